"""Sums of losses: of a step over all ranks, and of the steps since the last record.

Sums are in FP64, so that they do not depend on how tokens lie in micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor


@dataclass(frozen=True)
class LossSum:
    """Sum of per-token losses in nats and the number of tokens that counted, as FP64 `[2]` on the device.

    Zero on ranks that do not report the loss (see `ParallelGroups.reports_loss`), so that a sum over all ranks
    counts every token once.
    """

    sum_and_tokens: Tensor

    @classmethod
    def total(cls, parts: Sequence[LossSum]) -> LossSum:
        """The sum of several, of which there must be one at least."""
        return cls(torch.stack([part.sum_and_tokens for part in parts]).sum(dim=0))

    def reduced_mean(self) -> float:
        """Mean loss per token over all ranks, in nats; a collective over the whole world. NaN without tokens."""
        total = self.sum_and_tokens.clone()
        torch.distributed.all_reduce(total)
        loss_sum, num_tokens = total.tolist()
        return loss_sum / num_tokens if num_tokens > 0 else float("nan")


class GlobalLoss:
    """The loss sum of a step over all ranks, on its way: the device adds it up while nobody waits.

    Collective over the whole world when made.
    """

    def __init__(self, loss: LossSum) -> None:
        self._total = loss.sum_and_tokens.clone()
        self._reduction = torch.distributed.all_reduce(self._total, async_op=True)

    def sum_and_tokens(self) -> Tensor:
        """FP64 `[2]` on the device, as in `LossSum`."""
        if self._reduction is not None:
            self._reduction.wait()
        return self._total


def mean_loss(sum_and_tokens: Sequence[float]) -> float | None:
    """In nats per token; None without tokens, unless even the masked ones have spoilt the sum: 0 times NaN is NaN."""
    loss_sum, num_tokens = sum_and_tokens
    if num_tokens > 0:
        return loss_sum / num_tokens
    return None if loss_sum == 0 else math.nan


@dataclass(frozen=True)
class MeanLoss:
    """Of the steps since the last record, over all ranks: `mean` in nats per token, None where no token counted, and
    whether there was a step that was not skipped."""

    mean: float | None
    any_step: bool


class IntervalLoss:
    """Sum of the losses of the steps since the last `take`, skipped ones left out; added up step by step."""

    def __init__(self, device: torch.device) -> None:
        # Sum in nats, tokens, steps.
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, loss: LossSum) -> None:
        """Count a step that was not skipped."""
        self._sums[:2] += loss.sum_and_tokens
        self._sums[2] += 1

    def take(self) -> MeanLoss:
        """What there is since the last call; collective over all ranks."""
        # Of a resumed interval one rank knows all earlier steps: whether there were any is asked of all ranks.
        total = self._sums.clone()
        torch.distributed.all_reduce(total)
        self._sums.zero_()
        *sum_and_tokens, num_steps = total.tolist()
        return MeanLoss(mean_loss(sum_and_tokens), num_steps > 0)

    def state(self) -> Tensor:
        """This rank's sums, FP64 `[3]`; the ranks' sums belong together."""
        return self._sums.clone()

    def restore(self, sums: Tensor) -> None:
        """Put back a `state`."""
        self._sums.copy_(sums)
