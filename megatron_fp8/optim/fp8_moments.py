"""Owns the repair of FP8 moments that Transformer Engine's `FusedAdam` cannot scale.

FusedAdam stores an FP8 moment as moment / s with s = max |moment| / 448, one s for the part of a parameter that a rank
holds. Where all of that part is 0, or so small that 1 / s overflows FP32, its scale is infinite, 0 times infinity is
NaN, and the next step puts NaN into the weights. That is the case for the rows of an embedding that pad the
vocabulary: their gradient is always 0, and with enough data-parallel ranks one of them holds nothing else. Such a
moment is 0 here. (TE guards FP16 moments against it.) Must not know configs or models.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformer_engine.pytorch import Float8Tensor


def survive_zero_moments(optimizer: Optimizer) -> None:
    """After every step of `optimizer`, a `FusedAdam`, set FP8 moments that have an infinite scale to 0."""

    def repair(optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:  # noqa: ARG001
        for state in optimizer.state.values():
            for moment in state.values():
                if isinstance(moment, Float8Tensor):
                    _zero_if_unscalable(moment)

    optimizer.register_step_post_hook(repair)


@torch.no_grad()
def _zero_if_unscalable(moment: Float8Tensor) -> None:
    # Without a look at the scale from the host, which would wait for the device.
    scale: Tensor = moment._quantizer.scale
    unscalable = scale.isinf()
    moment._data.masked_fill_(unscalable, 0)
    moment._scale_inv.masked_fill_(unscalable, 1.0)
    scale.masked_fill_(unscalable, 1.0)
