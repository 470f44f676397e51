"""Scaled and masked softmax (TE's unfused attention) and dropout (TE's operation fuser).

Scores are `[b, h, sq, sk]`, or `[b * h, sq, sk]` in the upper-triangular form. Arithmetic is FP32, rounded once.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = (
    "dropout_bwd dropout_fwd scaled_aligned_causal_masked_softmax_backward "
    "scaled_aligned_causal_masked_softmax_forward scaled_masked_softmax_backward scaled_masked_softmax_forward "
    "scaled_softmax_backward scaled_softmax_forward scaled_upper_triang_masked_softmax_backward "
    "scaled_upper_triang_masked_softmax_forward"
).split()

# TE's kernel replaces masked scores by this, and returns zeros for rows that are fully masked.
_MASKED_SCORE = -10000.0
_MOST_KEYS = 16384


def _check_scores(scores: Tensor, axes: int, rows: int = 0, mask: Tensor | None = None) -> None:
    """Raise RuntimeError for scores that TE's `softmax.cpp` refuses.

    axes: their number; rows: the minimum number of queries; if it is not 0, keys must be divisible by 8.
    """
    if scores.dim() != axes:
        raise RuntimeError(f"expected {axes}D tensor, got {scores.dim()}D")
    if scores.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"Only fp16 and bf16 are supported, got {scores.dtype}")
    queries, keys = scores.shape[-2:]
    if keys > _MOST_KEYS:
        raise RuntimeError(f"Key sequence length must be {_MOST_KEYS} or less, got {keys}")
    if rows and keys % 8:
        raise RuntimeError(f"Key sequence length must be divisible by 8, got {keys}")
    if queries < rows:
        raise RuntimeError(f"Query sequence length must be {rows} or more, got {queries}")
    if mask is not None and (
        mask.dim() != axes or mask.shape[0] not in (1, scores.shape[0]) or mask.shape[1:] != (1, queries, keys)
    ):
        raise RuntimeError(f"mask of shape {list(mask.shape)} does not fit scores of shape {list(scores.shape)}")


def _backward(output_grads: Tensor, softmax_results: Tensor, scale: float) -> Tensor:
    """`scale * y * (dy - sum(dy * y))` over the last axis, in the dtype of output_grads."""
    for tensor in (output_grads, softmax_results):
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError(f"Only fp16 and bf16 are supported, got {tensor.dtype}")
    gradient = torch._softmax_backward_data(output_grads.float(), softmax_results.float(), -1, torch.float32)
    return gradient.mul_(scale).to(output_grads.dtype)


def scaled_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """`softmax(scale * x)` over the last axis; `[b, h, sq, sk]`, BF16 or FP16, result in the same dtype."""
    _check_scores(input, 4, rows=2)
    return torch.softmax(input.float() * scale_factor, dim=-1).to(input.dtype)


def scaled_softmax_backward(output_grad_: Tensor, softmax_results_: Tensor, scale_factor: float) -> Tensor:
    """Gradient of `scaled_softmax_forward` from its result."""
    return _backward(output_grad_, softmax_results_, scale_factor)


scaled_masked_softmax_backward = scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """`softmax` of `scale * x` with masked scores replaced by -10000; zeros for fully masked rows.

    input: `[b, h, sq, sk]`; mask: `[b or 1, 1, sq, sk]` bool or uint8, true where masked.
    """
    _check_scores(input, 4, rows=2, mask=mask)
    masked = mask.bool()
    scores = (input.float() * scale_factor).masked_fill_(masked, _MASKED_SCORE)
    result = torch.softmax(scores, dim=-1).masked_fill_(masked.all(dim=-1, keepdim=True), 0.0)
    return result.to(input.dtype)


def _causal_softmax(input: Tensor, scale: float) -> Tensor:
    """Softmax over keys up to the bottom-right diagonal, exactly 0 beyond it and in rows that end before it."""
    sq, sk = input.shape[-2:]
    beyond = torch.ones(sq, sk, dtype=torch.bool).triu_(sk - sq + 1)
    scores = (input.float() * scale).masked_fill_(beyond, float("-inf"))
    result = torch.softmax(scores, dim=-1)
    if sq > sk:
        result.masked_fill_(beyond.all(dim=-1, keepdim=True), 0.0)
    return result.to(input.dtype)


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Causal `softmax(scale * x)`, exactly 0 above the diagonal; input: `[b * h, s, s]`."""
    _check_scores(input, 3)
    return _causal_softmax(input, scale_factor)


def scaled_upper_triang_masked_softmax_backward(
    output_grads_: Tensor, softmax_results_: Tensor, scale_factor: float
) -> Tensor:
    """Gradient of `scaled_upper_triang_masked_softmax_forward` from its result."""
    return _backward(output_grads_, softmax_results_, scale_factor)


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Causal `softmax(scale * x)` with the diagonal at the bottom right; input: `[b, h, sq, sk]`."""
    _check_scores(input, 4, rows=1)
    return _causal_softmax(input, scale_factor)


_BITS_PER_BYTE = 8


def _pack(keep: Tensor) -> Tensor:
    """Bits of a bool tensor (a multiple of eight), eight to a byte, the first in the lowest bit."""
    weights = 2 ** torch.arange(_BITS_PER_BYTE, dtype=torch.uint8)
    return (keep.view(-1, _BITS_PER_BYTE).to(torch.uint8) * weights).sum(dim=1, dtype=torch.uint8)


def _unpack(mask: Tensor) -> Tensor:
    bits = torch.arange(_BITS_PER_BYTE, dtype=torch.uint8)
    return (mask.unsqueeze(1) >> bits & 1).bool().view(-1)


def dropout_fwd(input: Any, dropout_probability: float, out: Tensor | None = None) -> list[Tensor]:
    """Zero elements with `dropout_probability`, and divide the others by its complement.

    input: BF16 or FP16, any shape whose number of elements is divisible by 16; FP8 is dequantized first. Returns
    `[out, mask]`: mask is uint8 `[elements / 8]`, one bit per element, 1 where kept. Draws from the default generator.
    """
    values: Tensor = input.dequantize() if hasattr(input, "_fp8_dtype") else input
    keep = torch.empty(values.shape).bernoulli_(1.0 - dropout_probability)
    result = _scaled(values, keep.bool(), dropout_probability)
    return [result if out is None else out.copy_(result), _pack(keep.bool().view(-1))]


def dropout_bwd(
    grad_output: Tensor, mask: Tensor, dropout_probability: float, grad_input: Tensor | None = None
) -> Tensor:
    """Gradient of `dropout_fwd`: same elements zeroed, same factor."""
    result = _scaled(grad_output, _unpack(mask).view(grad_output.shape), dropout_probability)
    return result if grad_input is None else grad_input.copy_(result)


def _scaled(values: Tensor, keep: Tensor, dropout_probability: float) -> Tensor:
    factor = 1.0 / (1.0 - dropout_probability) if dropout_probability < 1.0 else 0.0
    return torch.where(keep, values * factor, torch.zeros((), dtype=values.dtype))
