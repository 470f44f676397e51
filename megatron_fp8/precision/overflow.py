"""Owns the decision that a loss scale does not help any more.

A step that overflows under FP16's loss scale is skipped and, if the scale is dynamic, lowers it (Megatron's
`DynamicGradScaler`): an ordinary event, since the scale is raised until it happens. But where the scale cannot fall,
being constant or at its minimum, nothing changes between one overflow and the next, and Megatron goes on skipping for
ever. Must not know optimizers or what is done about it. Imports no torch.
"""

from megatron_fp8.precision.policy import LossScaling

# Some batches in a row may overflow in a run that recovers; as many as this do not.
_MOST_OVERFLOWS_IN_A_ROW = 10


def overflows_in_a_row(before: int, skipped: bool, loss_scale: float, scaling: LossScaling) -> int:
    """How many steps up to this one overflowed in a row under a loss scale that cannot fall.

    `before`: the same after the step before; `loss_scale`: after this step.
    """
    falls = scaling.constant is None and loss_scale > scaling.minimum
    return before + 1 if skipped and not falls else 0


def overflow_problem(in_a_row: int, loss_scale: float, scaling: LossScaling) -> str | None:
    """What is wrong and what to do when too many overflowed in a row, else None."""
    if in_a_row < _MOST_OVERFLOWS_IN_A_ROW:
        return None
    return (
        f"gradients were not finite in {in_a_row} steps in a row, under a loss scale of {loss_scale:g} that "
        f"cannot fall further ({_why(scaling)}). Use precision.mode=bf16, lower optimizer.lr, lengthen "
        "optimizer.lr_warmup_iters, or look at the data of these steps"
    )


def _why(scaling: LossScaling) -> str:
    if scaling.constant is None:
        return f"precision.min_loss_scale={scaling.minimum:g}; lower it if the activations are finite"
    return f"precision.loss_scale={scaling.constant:g} is constant; null makes it dynamic"
