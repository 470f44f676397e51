"""Fused attention of `transformer_engine_torch`, through torch's fused CPU attention: no `[s, s]` score tensor.

Arithmetic is FP32 and results are rounded once: on CPUs without BF16 arithmetic torch's attention is several times
faster in FP32. Dropout, which torch's kernel lacks, is in `attention_dropout.py`. Must not know modules.

Supported: query, key and value as `[s, b, h, d]` or `[b, s, h, d]` (any strides, so the packed layouts too), fewer
key/value heads than query heads, no mask or a causal one. For everything else `get_fused_attn_backend` says no, with
the reason, and Transformer Engine takes its unfused path.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.enums import (
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from megatron_fp8.cpu.kernels.attention_dropout import dropout_attention, dropout_attention_backward

__all__ = ["fused_attn_bwd", "fused_attn_fwd", "get_fused_attn_backend"]

_HIGH_PRECISION = (4, 5, 6)  # FP32, FP16, BF16
_CAUSAL = (NVTE_Mask_Type.NVTE_CAUSAL_MASK, NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK)


def get_fused_attn_backend(params: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """Whether `fused_attn_fwd` can do what `FusedAttentionParams` describe: the backend, or none and why."""
    reasons = [
        (int(params.qkv_dtype) not in _HIGH_PRECISION, "FP8 attention"),
        (_format_of(params.qkv_layout) is None, f"layout {params.qkv_layout!r}"),
        (params.attn_mask_type not in (NVTE_Mask_Type.NVTE_NO_MASK, *_CAUSAL), f"mask {params.attn_mask_type!r}"),
        (
            params.attn_mask_type == NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK
            and params.max_seqlen_q != params.max_seqlen_kv,
            "a bottom-right causal mask with unequal lengths",
        ),
        (params.bias_type != NVTE_Bias_Type.NVTE_NO_BIAS, f"bias {params.bias_type!r}"),
        (params.softmax_type != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, f"softmax {params.softmax_type!r}"),
        (params.window_size_left != -1 or params.window_size_right not in (-1, 0), "sliding-window attention"),
        (params.return_max_logit, "return_max_logit"),
    ]
    for refused, reason in reasons:
        if refused:
            return NVTE_Fused_Attn_Backend.NVTE_No_Backend, f"the CPU stand-in has no fused {reason}"
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


def fused_attn_fwd(
    max_seqlen_q: int,  # noqa: ARG001
    max_seqlen_kv: int,  # noqa: ARG001
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,  # noqa: ARG001
    qkv_layout: Any,
    o_format: Any,
    qkv_scale_inv_format: Any,  # noqa: ARG001
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: tuple[int, int],
    bottom_right_diagonal: bool,  # noqa: ARG001
    cu_seqlens_q: Tensor,  # noqa: ARG001
    cu_seqlens_kv: Tensor,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fake_dtype: torch.dtype,
    *others: Any,
) -> list[Tensor]:
    """`softmax(scale * Q K^T) V` per head; q `[s, b, h, d]` or `[b, s, h, d]`, k and v with h or fewer heads.

    Returns `[out, softmax_lse, rng_state]`: out in q's shape and dtype; softmax_lse FP32 `[b, h, s, 1]`; rng_state
    the generator's state that the dropout mask was drawn from.
    """
    _refuse(qkv_layout, bias_type, softmax_type, window_size, others)
    sequence_first = _format_of(qkv_layout) == NVTE_QKV_Format.NVTE_SBHD
    query, key, value = (_heads_first(x, sequence_first, q.shape[2]) for x in (q, k, v))
    causal = attn_mask_type in _CAUSAL
    rng_state = torch.empty(0, dtype=torch.uint8)
    if is_training and p_dropout > 0.0:
        rng_state = torch.default_generator.get_state()
        out, lse = dropout_attention(query, key, value, attn_scale, causal, p_dropout, torch.default_generator)
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=attn_scale
        )
    return [_from_heads_first(out, o_format, fake_dtype), lse.unsqueeze(-1), rng_state]


def fused_attn_bwd(
    max_seqlen_q: int,  # noqa: ARG001
    max_seqlen_kv: int,  # noqa: ARG001
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,  # noqa: ARG001
    qkv_layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    qkv_scale_inv_format: Any,  # noqa: ARG001
    do_scale_inv_format: Any,  # noqa: ARG001
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: tuple[int, int],
    bottom_right_diagonal: bool,  # noqa: ARG001
    deterministic: bool,  # noqa: ARG001 - this is
    cu_seqlens_q: Tensor,  # noqa: ARG001
    cu_seqlens_kv: Tensor,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    fake_dtype: torch.dtype,
    aux_ctx_tensors: list[Tensor],
    *others: Any,
) -> list[Tensor]:
    """Gradients `[dq, dk, dv]` of `fused_attn_fwd` in the shapes of q, k and v; `aux_ctx_tensors` are its last two."""
    _refuse(qkv_layout, bias_type, softmax_type, window_size, others)
    num_heads, num_groups = q.shape[2], k.shape[2]
    sequence_first = _format_of(qkv_layout) == NVTE_QKV_Format.NVTE_SBHD
    query, key, value = (_heads_first(x, sequence_first, num_heads) for x in (q, k, v))
    out = _heads_first(o, int(o_format) == NVTE_QKV_Format.NVTE_SBHD, num_heads)
    grad = _heads_first(d_o, int(do_format) == NVTE_QKV_Format.NVTE_SBHD, num_heads)
    lse, rng_state = aux_ctx_tensors[0].squeeze(-1), aux_ctx_tensors[1]
    causal = attn_mask_type in _CAUSAL
    if p_dropout > 0.0 and rng_state.numel():
        generator = torch.Generator()
        generator.set_state(rng_state)
        grads = dropout_attention_backward(
            grad, query, key, value, out, lse, attn_scale, causal, p_dropout, generator
        )
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, causal, scale=attn_scale
        )
    dq, dk, dv = grads
    if num_groups != num_heads:
        dk, dv = (x.unflatten(1, (num_groups, num_heads // num_groups)).sum(dim=2) for x in (dk, dv))
    grad_format = _format_of(dqkv_layout)
    return [_from_heads_first(x, grad_format, fake_dtype) for x in (dq, dk, dv)]


def _format_of(qkv_layout: Any) -> NVTE_QKV_Format | None:
    """The order of axes of q, k and v in a layout: SBHD, BSHD, or None for packed or mixed ones."""
    name = NVTE_QKV_Layout(int(qkv_layout)).name.removeprefix("NVTE_")
    parts = name.split("_")
    if all(part.startswith("SB") for part in parts):
        return NVTE_QKV_Format.NVTE_SBHD
    if all(part.startswith("BS") for part in parts):
        return NVTE_QKV_Format.NVTE_BSHD
    return None


def _refuse(
    qkv_layout: Any, bias_type: Any, softmax_type: Any, window_size: tuple[int, int], others: tuple[Any, ...]
) -> None:
    supported = (
        _format_of(qkv_layout) is not None
        and bias_type == NVTE_Bias_Type.NVTE_NO_BIAS
        and softmax_type == NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
        and window_size[0] == -1
        and window_size[1] in (-1, 0)
    )
    if not supported:
        raise NotImplementedError(
            f"fused_attn with layout {qkv_layout!r}, bias {bias_type!r}, softmax {softmax_type!r}, window "
            f"{window_size} has no CPU stand-in"
        )
    if any(_is_quantizer(other) for other in others):
        raise NotImplementedError("fused_attn with FP8 output or gradients has no CPU stand-in")


def _is_quantizer(value: Any) -> bool:
    return hasattr(value, "rowwise_usage")


def _heads_first(x: Tensor, sequence_first: bool, num_heads: int) -> Tensor:
    """FP32 `[b, num_heads, s, d]`; a key/value head is repeated for the query heads of its group."""
    x = (x.permute(1, 2, 0, 3) if sequence_first else x.permute(0, 2, 1, 3)).float()
    if x.shape[1] != num_heads:
        x = x.repeat_interleave(num_heads // x.shape[1], dim=1)
    return x


def _from_heads_first(x: Tensor, qkv_format: Any, dtype: torch.dtype) -> Tensor:
    """`[b, h, s, d]` in the given order of axes, contiguous, rounded to `dtype`."""
    sequence_first = int(qkv_format) == NVTE_QKV_Format.NVTE_SBHD
    x = x.permute(2, 0, 1, 3) if sequence_first else x.permute(0, 2, 1, 3)
    return x.to(dtype).contiguous()
