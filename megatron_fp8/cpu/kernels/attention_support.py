"""Which attention cuDNN has: its answers for compute capability 9.0 in the version of `enums`.

TE describes an attention to cuDNN, forward and backward, and takes its fused path where cuDNN can make a plan of it.
These are the rules by which cuDNN refuses what TE asks of it for this program's models. What TE refuses without asking
(a soft cap, windows with dropout, sinks with determinism), its own Python refuses here too.
"""

from typing import Any

import torch

from megatron_fp8.cpu.enums import (
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from megatron_fp8.cpu.kernels.casts import torch_dtype

__all__ = ["get_fused_attn_backend"]

_BOTTOM_RIGHT = (
    NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK,
    NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
)


def get_fused_attn_backend(fused_attn_params: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """The sub-backend for TE's `FusedAttentionParams`, and the reason if there is none.

    TE takes its unfused path where there is none: for FP32 (which `library_patches` sends back to this kernel), for
    what cuDNN refuses, and for what has no stand-in: FP8 attention, biases, paged KV caches and the maximum logit.
    """
    reasons = [*_without_stand_in(fused_attn_params), *_refused_by_cudnn(fused_attn_params)]
    if reasons:
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "; ".join(reasons)
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


def _without_stand_in(params: Any) -> list[str]:
    layout, dtype = NVTE_QKV_Layout(int(params.qkv_layout)).name, torch_dtype(params.qkv_dtype)
    missing = {
        f"qkv dtype {dtype}": dtype not in (torch.bfloat16, torch.float16),
        f"bias type {params.bias_type!r}": int(params.bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS,
        f"qkv layout {layout}": "Paged" in layout,
        "return_max_logit": bool(params.return_max_logit),
    }
    return [f"no CPU stand-in for {what}" for what, is_asked in missing.items() if is_asked]


def _refused_by_cudnn(params: Any) -> list[str]:
    layout = NVTE_QKV_Layout(int(params.qkv_layout)).name.removeprefix("NVTE_")
    has_packed_queries = layout.startswith("T")
    has_sinks = int(params.softmax_type) != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    has_one_query = int(params.max_seqlen_q) == 1 and not has_packed_queries
    heads = (int(params.head_dim_qk), int(params.head_dim_v))
    refusals = {
        f"heads of {heads[0]} and {heads[1]}": not _has_heads(heads, bool(params.is_training)),
        "a sink in packed sequences needs cuDNN 9.26 for its gradient": (
            has_sinks and has_packed_queries and params.is_training
        ),
        "one query, as in decoding, has no sink": has_sinks and has_one_query,
        "s_q = s_kv = 1 is not supported": (
            has_one_query and int(params.max_seqlen_kv) == 1 and bool(params.is_training)
        ),
        "a causal mask at the bottom right has no dropout": (
            int(params.attn_mask_type) in _BOTTOM_RIGHT and params.dropout > 0.0
        ),
    }
    return [reason for reason, is_refused in refusals.items() if is_refused]


def _has_heads(sizes: tuple[int, int], is_training: bool) -> bool:
    """Whether there are kernels for heads of these sizes; training asks for the backward pass too."""
    if any(size % 8 for size in sizes):
        return False
    if not is_training:
        return True
    if torch.cuda.get_device_capability() >= (10, 0):
        return max(sizes) <= 128 or sizes == (192, 128)
    return max(sizes) <= 256
