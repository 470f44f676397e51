"""Owns the losses of the steps since the last record: their sum, which a checkpoint in between carries on exactly.

Must not know what is recorded.
"""

import torch
from torch import Tensor

from megatron_fp8.train.step import StepResult


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

    def take(self) -> float | None:
        """Mean loss per token over all ranks since the last call, None without a step; collective over all ranks."""
        # Of a resumed interval one rank knows all earlier steps: whether there were any is asked of all ranks.
        total = self._sums.clone()
        torch.distributed.all_reduce(total)
        self._sums.zero_()
        loss_sum, num_tokens, num_steps = total.tolist()
        if num_steps == 0:
            return None
        return loss_sum / num_tokens if num_tokens > 0 else float("nan")

    def state(self) -> Tensor:
        """This rank's sums, FP64 `[3]`; the ranks' sums belong together."""
        return self._sums.clone()

    def restore(self, sums: Tensor) -> None:
        """Put back a `state`."""
        self._sums.copy_(sums)
