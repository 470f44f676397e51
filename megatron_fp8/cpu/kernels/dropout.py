"""Dropout of `transformer_engine_torch` (TE's operation fuser). Attention has its own. Must not know modules."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["dropout_bwd", "dropout_fwd"]

_BITS_PER_BYTE = 8


def _pack(keep: Tensor) -> Tensor:
    """Bits of a bool tensor, eight to a byte, the first in the lowest bit; its size is a multiple of eight."""
    weights = 2 ** torch.arange(_BITS_PER_BYTE, dtype=torch.uint8)
    return (keep.view(-1, _BITS_PER_BYTE).to(torch.uint8) * weights).sum(dim=1, dtype=torch.uint8)


def _unpack(mask: Tensor) -> Tensor:
    bits = torch.arange(_BITS_PER_BYTE, dtype=torch.uint8)
    return (mask.unsqueeze(1) >> bits & 1).bool().view(-1)


def dropout_fwd(input: Any, dropout_probability: float, out: Tensor | None = None) -> list[Tensor]:
    """Zero elements with `dropout_probability`, and divide the others by its complement.

    input: any shape, a number of elements that is a multiple of 16, BF16 or FP16; FP8 is dequantized first.
    Returns `[out, mask]`: out of input's shape and dtype; mask uint8 `[elements / 8]`, a bit for each that is kept.
    Draws from the default generator.
    """
    values: Tensor = input.dequantize() if hasattr(input, "_fp8_dtype") else input
    keep = torch.empty(values.shape).bernoulli_(1.0 - dropout_probability)
    result = _scaled(values, keep.bool(), dropout_probability)
    return [result if out is None else out.copy_(result), _pack(keep.bool().view(-1))]


def dropout_bwd(
    grad_output: Tensor, mask: Tensor, dropout_probability: float, grad_input: Tensor | None = None
) -> Tensor:
    """Gradient of `dropout_fwd`: the same elements zeroed, the same factor on the others."""
    result = _scaled(grad_output, _unpack(mask).view(grad_output.shape), dropout_probability)
    return result if grad_input is None else grad_input.copy_(result)


def _scaled(values: Tensor, keep: Tensor, dropout_probability: float) -> Tensor:
    factor = 1.0 / (1.0 - dropout_probability) if dropout_probability < 1.0 else 0.0
    return torch.where(keep, values * factor, torch.zeros((), dtype=values.dtype))
