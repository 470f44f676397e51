"""Owns access to Transformer Engine's FP8 scaling state as named tensors. Must not know recipes or groups."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

# TE keeps one state for the operands of the forward and one for those of the backward GEMMs of a module.
_DIRECTIONS = ("scaling_fwd", "scaling_bwd")


@dataclass(frozen=True)
class ScalingState:
    """The scaling state of one module in one direction.

    `name`: module name and direction. `scale`: FP32 `[num_operands]`. `amax_history`: FP32
    `[history_len, num_operands]`; row 0 collects the running step. Both are TE's own tensors, not copies.
    """

    name: str
    scale: torch.Tensor
    amax_history: torch.Tensor


def scaling_states(module: nn.Module, prefix: str = "") -> Iterator[ScalingState]:
    """Every delayed-scaling state below `module`, in the order of its modules; `prefix` goes before their names."""
    for name, child in module.named_modules():
        meta = getattr(child, "fp8_meta", None)
        if meta is None:
            continue
        for direction in _DIRECTIONS:
            state = meta.get(direction)
            if state is not None and getattr(state, "amax_history", None) is not None:
                yield ScalingState(f"{prefix}{name}.{direction}", state.scale, state.amax_history)
