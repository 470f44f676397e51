"""Scaled and masked softmax of `transformer_engine_torch`, which TE's unfused attention uses.

Owns the softmax over scores `[b, h, sq, sk]` (or `[b * h, sq, sk]` for the upper-triangular form); such tensors exist
only on TE's unfused path. Arithmetic is FP32 and rounded once. Must not know attention.
"""

import torch
from torch import Tensor

__all__ = [
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_forward",
]

# TE's kernel replaces masked scores by this and gives zeros where a whole row is masked.
_MASKED_SCORE = -10000.0


def _backward(output_grads: Tensor, softmax_results: Tensor, scale: float) -> Tensor:
    """`scale * y * (dy - sum(dy * y))` over the last axis, in the dtype of output_grads."""
    gradient = torch._softmax_backward_data(output_grads.float(), softmax_results.float(), -1, torch.float32)
    return gradient.mul_(scale).to(output_grads.dtype)


def scaled_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """`softmax(scale * x)` over the last axis; any shape, FP32, BF16 or FP16, result in the same dtype."""
    return torch.softmax(input.float() * scale_factor, dim=-1).to(input.dtype)


def scaled_softmax_backward(output_grad_: Tensor, softmax_results_: Tensor, scale_factor: float) -> Tensor:
    """Gradient of `scaled_softmax_forward` from its result."""
    return _backward(output_grad_, softmax_results_, scale_factor)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """`softmax` of `scale * x` with masked scores replaced by -10000; rows that are masked wholly give zeros.

    input: `[b, h, sq, sk]`; mask: `[b or 1, 1, sq, sk]` bool or uint8, true where masked.
    """
    masked = mask.bool()
    scores = (input.float() * scale_factor).masked_fill_(masked, _MASKED_SCORE)
    result = torch.softmax(scores, dim=-1).masked_fill_(masked.all(dim=-1, keepdim=True), 0.0)
    return result.to(input.dtype)


def scaled_masked_softmax_backward(output_grad_: Tensor, softmax_results_: Tensor, scale_factor: float) -> Tensor:
    """Gradient of `scaled_masked_softmax_forward` from its result."""
    return _backward(output_grad_, softmax_results_, scale_factor)


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
    return _causal_softmax(input, scale_factor)


def scaled_upper_triang_masked_softmax_backward(
    output_grads_: Tensor, softmax_results_: Tensor, scale_factor: float
) -> Tensor:
    """Gradient of `scaled_upper_triang_masked_softmax_forward` from its result."""
    return _backward(output_grads_, softmax_results_, scale_factor)


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Causal `softmax(scale * x)` with the diagonal at the bottom right; input: `[b, h, sq, sk]`."""
    return _causal_softmax(input, scale_factor)


def scaled_aligned_causal_masked_softmax_backward(
    output_grad_: Tensor, softmax_results_: Tensor, scale_factor: float
) -> Tensor:
    """Gradient of `scaled_aligned_causal_masked_softmax_forward` from its result."""
    return _backward(output_grad_, softmax_results_, scale_factor)
