"""Owns the losses of the steps since the last record: their sum, which a checkpoint in between carries on exactly.

Must not know what is recorded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp8.train.step import StepResult, mean_loss


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

    def add(self, result: StepResult) -> None:
        """Count a step."""
        if not result.skipped:
            self._sums[:2] += result.loss.sum_and_tokens
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
