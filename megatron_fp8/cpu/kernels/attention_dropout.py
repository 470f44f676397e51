"""Attention with dropout on the probabilities, in blocks of query rows: memory for `[b, h, block, s]` scores only.

The mask is drawn block by block from a generator; the backward pass draws it again from the same state. Must not know
layouts or Transformer Engine.
"""

import torch
from torch import Tensor

_BLOCK_ROWS = 64


def dropout_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, p: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Output FP32 `[b, h, s, d]` and the log of the softmax's denominator `[b, h, s]`.

    `out = (mask * softmax(scale * Q K^T) / (1 - p)) V`, `mask` 0 with probability `p`, drawn from `generator`.
    """
    out = torch.empty(*query.shape[:-1], value.shape[-1])
    lse = torch.empty(query.shape[:-1])
    for start in range(0, query.shape[2], _BLOCK_ROWS):
        rows = slice(start, min(start + _BLOCK_ROWS, query.shape[2]))
        scores = _scores(query, key, scale, causal, rows)
        lse[:, :, rows] = torch.logsumexp(scores, dim=-1)
        probabilities = scores.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
        out[:, :, rows] = probabilities.mul_(_kept(scores, p, generator)) @ value
    return out, lse


def dropout_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    p: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `generator` in the state that the forward pass began with."""
    dq, dk, dv = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    # sum_j P_ij dP_ij, which is rowsum(dO * O) with dropout too (FlashAttention, Dao et al. 2022, appendix B.4).
    delta = (grad * out).sum(dim=-1, keepdim=True)
    for start in range(0, query.shape[2], _BLOCK_ROWS):
        rows = slice(start, min(start + _BLOCK_ROWS, query.shape[2]))
        scores = _scores(query, key, scale, causal, rows)
        probabilities = scores.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
        kept = _kept(scores, p, generator)
        dv += (probabilities * kept).transpose(-1, -2) @ grad[:, :, rows]
        d_scores = (grad[:, :, rows] @ value.transpose(-1, -2)).mul_(kept).sub_(delta[:, :, rows])
        d_scores.mul_(probabilities).mul_(scale)
        dq[:, :, rows] = d_scores @ key
        dk += d_scores.transpose(-1, -2) @ query[:, :, rows]
    return dq, dk, dv


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool, rows: slice) -> Tensor:
    scores = (query[:, :, rows] @ key.transpose(-1, -2)).mul_(scale)
    if causal:
        positions = torch.arange(rows.start, rows.stop).unsqueeze(1)
        scores.masked_fill_(torch.arange(key.shape[2]) > positions, float("-inf"))
    return scores


def _kept(scores: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """1 / (1 - p) where a probability stays, 0 where it is dropped."""
    return torch.empty_like(scores).bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)
