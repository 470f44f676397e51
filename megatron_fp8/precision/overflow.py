"""Owns the decision that a loss scale does not help any more.

A step that overflows under FP16's loss scale is skipped and, if the scale is dynamic, lowers it (Megatron's
`DynamicGradScaler`): an ordinary event, since the scale is raised until it happens. But where the scale cannot fall,
being constant or at its minimum, nothing changes between one overflow and the next, and Megatron goes on skipping for
ever. Must not know optimizers or what is done about it. Imports no torch.
"""

from megatron_fp8.precision.policy import LossScaling

# Some batches in a row may overflow in a run that recovers; as many as this do not.
_MOST_OVERFLOWS_IN_A_ROW = 10


class OverflowWatch:
    """Counts overflows in a row under a loss scale that cannot fall."""

    def __init__(self, scaling: LossScaling) -> None:
        self._scaling = scaling
        self._in_a_row = 0

    def effective_step(self) -> None:
        """Count a step that was not skipped."""
        self._in_a_row = 0

    def skipped_step(self, loss_scale: float) -> str | None:
        """Count a skipped step; `loss_scale` is the scale after it. Returns what is wrong and what to do, or None."""
        falls = self._scaling.constant is None and loss_scale > self._scaling.minimum
        self._in_a_row = 0 if falls else self._in_a_row + 1
        if self._in_a_row < _MOST_OVERFLOWS_IN_A_ROW:
            return None
        return (
            f"gradients were not finite in {self._in_a_row} steps in a row, under a loss scale of {loss_scale:g} that "
            f"cannot fall further ({self._why()}). Use precision.mode=bf16, lower optimizer.lr, lengthen "
            "optimizer.lr_warmup_iters, or look at the data of these steps"
        )

    def _why(self) -> str:
        if self._scaling.constant is None:
            return f"precision.min_loss_scale={self._scaling.minimum:g}; lower it if the activations are finite"
        return f"precision.loss_scale={self._scaling.constant:g} is constant; null makes it dynamic"
