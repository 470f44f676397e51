"""Attention of one dense batch: torch's fused CPU kernel where it can, blocks of queries where it cannot.

Owns that choice. Inputs are FP32 `[b, h, s, d]`; neither engine makes a tensor of queries by keys. Must not
know layouts or sequence packing.
"""

import torch

from megatron_fp8.cpu.kernels import attention_blocks
from megatron_fp8.cpu.kernels.attention_blocks import ScoreRules

_aten = torch.ops.aten


def _fused_in_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: ScoreRules) -> bool:
    mask_is_plain = rules.mask.is_full() or rules.mask.is_plain_causal(q.shape[2], k.shape[2])
    return rules.dropout == 0.0 and mask_is_plain and q.shape[3] == v.shape[3] and min(q.shape[2], k.shape[2]) > 0


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: ScoreRules) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[b, h, sq, dv]` and log-sum-exp `[b, h, sq]`; see `attention_blocks.forward`."""
    if not _fused_in_torch(q, k, v, rules):
        return attention_blocks.forward(q, k, v, rules)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, not rules.mask.is_full(), scale=rules.scale
    )
    return out, lse


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rules: ScoreRules,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients for q, k and v; see `attention_blocks.backward`."""
    if not _fused_in_torch(q, k, v, rules):
        return attention_blocks.backward(grad, q, k, v, out, lse, rules)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, not rules.mask.is_full(), scale=rules.scale
    )
    return dq, dk, dv
