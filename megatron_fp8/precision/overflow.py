"""Detects an FP16 loss scale that cannot recover.

A step that overflows is skipped and lowers a dynamic scale (Megatron's `DynamicGradScaler`): routine, because the scale
is raised until that happens. A scale that is constant or at its minimum cannot fall; every further step would overflow,
and Megatron would skip forever. Imports no torch.
"""

from megatron_fp8.precision.policy import LossScaling

# A run that recovers may overflow in a few consecutive batches, but not in this many.
_MAX_CONSECUTIVE_OVERFLOWS = 10


def overflows_in_a_row(before: int, skipped: bool, loss_scale: float, scaling: LossScaling) -> int:
    """Number of consecutive steps up to this one that overflowed under a loss scale that cannot fall.

    `before`: the number up to the previous step; `loss_scale`: after this step.
    """
    falls = scaling.constant is None and loss_scale > scaling.minimum
    return before + 1 if skipped and not falls else 0


def overflow_problem(consecutive: int, loss_scale: float, scaling: LossScaling) -> str | None:
    """The error after too many consecutive overflows, else None."""
    if consecutive < _MAX_CONSECUTIVE_OVERFLOWS:
        return None
    if scaling.constant is None:
        why = f"precision.min_loss_scale={scaling.minimum:g}; lower it if the activations are finite"
    else:
        why = f"precision.loss_scale={scaling.constant:g} is constant; null makes it dynamic"
    return (
        f"gradients were not finite in {consecutive} consecutive steps, under a loss scale of {loss_scale:g} that "
        f"cannot fall further ({why}). Use precision.mode=bf16, lower optimizer.lr, lengthen "
        "optimizer.lr_warmup_iters, or inspect the data of these steps"
    )
