"""Fused attention of `transformer_engine_torch`: forward, backward, and which configurations it takes.

TE's argument lists, and the tensors saved for the backward pass. Arithmetic is FP32 and results are rounded once; the
work itself is in `attention_blocks`, layouts are in `attention_layout`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron_fp8.cpu.enums import (
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from megatron_fp8.cpu.kernels import attention_blocks
from megatron_fp8.cpu.kernels.attention_blocks import AttentionMask, ScoreRules
from megatron_fp8.cpu.kernels.attention_layout import (
    QkvLayout,
    Segment,
    empty_gradients,
    format_name,
    heads_first,
    segments,
    shape_like,
)
from megatron_fp8.cpu.kernels.casts import torch_dtype

__all__ = ["fused_attn_bwd", "fused_attn_fwd", "get_fused_attn_backend"]


def get_fused_attn_backend(fused_attn_params: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """The sub-backend for TE's `FusedAttentionParams`, and the reason if there is none.

    Supported: BF16 and FP16 with any mask, window, dropout, grouped or multi-query heads and every layout except paged
    KV caches, in cuDNN's head sizes. TE takes its unfused path otherwise: for FP32 (which `library_patches` sends back
    to this kernel), FP8 attention, biases, softmax with an offset, and the maximum logit.
    """
    layout = NVTE_QKV_Layout(int(fused_attn_params.qkv_layout)).name
    dtype = torch_dtype(fused_attn_params.qkv_dtype)
    refusals = {
        f"qkv dtype {dtype}": dtype not in (torch.bfloat16, torch.float16),
        f"heads of {fused_attn_params.head_dim_qk} and {fused_attn_params.head_dim_v}": not _has_head_dims(
            fused_attn_params
        ),
        f"bias type {fused_attn_params.bias_type!r}": int(fused_attn_params.bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS,
        f"softmax type {fused_attn_params.softmax_type!r}": (
            int(fused_attn_params.softmax_type) != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
        ),
        f"qkv layout {layout}": "Paged" in layout,
        "return_max_logit": bool(fused_attn_params.return_max_logit),
    }
    reasons = [reason for reason, refused in refusals.items() if refused]
    if reasons:
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend, f"no CPU stand-in for {', '.join(reasons)}"
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


def _has_head_dims(params: Any) -> bool:
    """Whether cuDNN of the version in `enums` has kernels for these head sizes, by TE's `fused_attn.cpp`."""
    sizes = (int(params.head_dim_qk), int(params.head_dim_v))
    if any(size % 8 for size in sizes):
        return False
    if max(sizes) <= 128:
        return True
    if not params.is_training:
        causal = (NVTE_Mask_Type.NVTE_CAUSAL_MASK, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK)
        return int(params.max_seqlen_q) > 1 or int(params.attn_mask_type) not in causal
    if torch.cuda.get_device_capability() >= (10, 0):
        return sizes == (192, 128)
    return max(sizes) <= 256 and (sizes[0] == sizes[1] or min(sizes) < 128 or sizes == (192, 128))


def _require_supported(bias_type: Any, softmax_type: Any, options: dict[str, bool]) -> None:
    refused = [name for name, used in options.items() if used]
    if int(bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS:
        refused.append(NVTE_Bias_Type(int(bias_type)).name)
    if int(softmax_type) != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX:
        refused.append(NVTE_Softmax_Type(int(softmax_type)).name)
    if refused:
        raise NotImplementedError(f"fused attention with {', '.join(refused)} has no CPU stand-in")


def _mask(mask_type: Any, window: Sequence[int] | None, bottom_right: bool) -> tuple[AttentionMask, bool]:
    """The mask, and whether sequences are padded."""
    name = NVTE_Mask_Type(int(mask_type)).name
    bounds = (-1, -1) if window is None else (int(window[0]), int(window[1]))
    return AttentionMask.from_te("CAUSAL" in name, bounds, bottom_right), "PADDING" in name


def _draw_rng_state(dropout: float, generator: torch.Generator | None) -> torch.Tensor:
    """`[seed, offset]` int64 of the dropout masks; the generator advances only with dropout."""
    state = torch.zeros(2, dtype=torch.int64)
    if dropout > 0.0:
        state[0] = torch.randint(2**62, (), generator=generator)
    return state


def _segment_rules(rules: ScoreRules, index: int) -> ScoreRules:
    """Rules with different dropout masks for every sequence."""
    return ScoreRules(rules.scale, rules.mask, rules.dropout, rules.dropout_seed + index)


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
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
    window_size: Sequence[int],
    bottom_right_diagonal: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    fake_dtype: torch.dtype,
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_kv_padded: torch.Tensor | None,
    page_table_k: torch.Tensor | None,
    page_table_v: torch.Tensor | None,
    s_quantizer: Any,
    o_quantizer: Any,
    bias: torch.Tensor | None,  # noqa: ARG001
    softmax_offset: torch.Tensor | None,  # noqa: ARG001
    rng_gen: torch.Generator | None,
    rng_elts_per_thread: int,  # noqa: ARG001
    return_max_logit: bool,
    cuda_graph: bool,  # noqa: ARG001
) -> list[torch.Tensor]:
    """`softmax(mask(attn_scale * q k^T)) v` within each sequence, with dropout of probabilities.

    q: `[s, b, h, d]`, `[b, s, h, d]` or `[t, h, d]` as qkv_layout says, of any stride; k, v alike with their
    own number of heads, of which h is a multiple. fake_dtype: dtype of the output.
    Returns `[out, softmax_lse, rng_state]`. out: o_format, contiguous, zero where padded. softmax_lse: FP32
    natural log-sum-exp of scaled scores, `[b, h, sq, 1]`, for `thd` `[t, h, 1]`. rng_state: int64
    `[seed, offset]`. Without `is_training` only out matters, and TE drops the rest.
    """
    del is_training
    _require_supported(
        bias_type,
        softmax_type,
        {
            "paged KV cache": page_table_k is not None or page_table_v is not None,
            "FP8": s_quantizer is not None or o_quantizer is not None,
            "return_max_logit": return_max_logit,
        },
    )
    mask, padded = _mask(attn_mask_type, window_size, bottom_right_diagonal)
    rng_state = _draw_rng_state(p_dropout, rng_gen)
    rules = ScoreRules(attn_scale, mask, p_dropout, int(rng_state[0]))
    layout = QkvLayout.from_te(qkv_layout)
    parts = segments(
        layout,
        padded,
        (cu_seqlens_q, cu_seqlens_kv),
        (cu_seqlens_q_padded, cu_seqlens_kv_padded),
        (max_seqlen_q, max_seqlen_kv),
    )
    out_format = format_name(o_format)
    out = torch.empty(shape_like(q, layout.q_format, out_format, v.shape[-1]), dtype=fake_dtype)
    q_view = heads_first(q, layout.q_format)
    k_view, v_view = heads_first(k, layout.kv_format), heads_first(v, layout.kv_format)
    out_view = heads_first(out, out_format)
    lse = torch.empty(q_view.shape[:3], dtype=torch.float32)
    if not _covers_everything(parts):
        out.zero_()
        lse.fill_(-math.inf)
    for index, part in enumerate(parts):
        part_out, part_lse = attention_blocks.forward(
            _working_copy(part.of_q(q_view)),
            _working_copy(part.of_kv(k_view)),
            _working_copy(part.of_kv(v_view)),
            _segment_rules(rules, index),
        )
        part.of_q(out_view).copy_(part_out)
        part.of_q(lse).copy_(part_lse)
    return [out, _lse_to_te(lse, layout.q_format), rng_state]


def _working_copy(view: torch.Tensor) -> torch.Tensor:
    """FP32, contiguous as `[b, h, s, d]`, which saves a tenth of the kernel's time on `[s, b, h, d]`."""
    if view.dtype == torch.float32 and view.is_contiguous():
        return view
    return torch.empty(view.shape, dtype=torch.float32).copy_(view)


def _covers_everything(parts: list[Segment]) -> bool:
    return len(parts) == 1 and parts[0].q_rows == slice(None)


def _lse_to_te(lse: torch.Tensor, q_format: str) -> torch.Tensor:
    """`[b, h, s]` as TE keeps it: `[b, h, s, 1]`, or `[t, h, 1]` for `thd`."""
    if q_format == "thd":
        return lse[0].transpose(0, 1).contiguous().unsqueeze(-1)
    return lse.unsqueeze(-1)


def _lse_from_te(lse: torch.Tensor, q_format: str) -> torch.Tensor:
    if q_format == "thd" and lse.dim() == 3:
        return lse.squeeze(-1).transpose(0, 1).unsqueeze(0)
    return lse.squeeze(-1)


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
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
    window_size: Sequence[int],
    bottom_right_diagonal: bool,
    deterministic: bool,  # noqa: ARG001
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    d_o: torch.Tensor,
    fake_dtype: torch.dtype,
    aux_ctx_tensors: Sequence[torch.Tensor],
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_kv_padded: torch.Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool,  # noqa: ARG001
) -> list[torch.Tensor | None]:
    """Gradients of `fused_attn_fwd`, always deterministic.

    aux_ctx_tensors: the forward pass's `[softmax_lse, rng_state]`; o, d_o: its output and the gradient of it,
    in o_format and do_format. Returns `[dq, dk, dv, None, None]` in fake_dtype, of the shapes of q, k, v and
    packed in memory as dqkv_layout says, zero where padded; the last two are of bias and softmax offset.
    """
    quantizers = (s_quantizer, dp_quantizer, dqkv_quantizer)
    _require_supported(bias_type, softmax_type, {"FP8": any(x is not None for x in quantizers)})
    mask, padded = _mask(attn_mask_type, window_size, bottom_right_diagonal)
    layout = QkvLayout.from_te(qkv_layout)
    lse = _lse_from_te(aux_ctx_tensors[0], layout.q_format)
    rules = ScoreRules(attn_scale, mask, p_dropout, int(aux_ctx_tensors[1][0]))
    parts = segments(
        layout,
        padded,
        (cu_seqlens_q, cu_seqlens_kv),
        (cu_seqlens_q_padded, cu_seqlens_kv_padded),
        (max_seqlen_q, max_seqlen_kv),
    )
    gradients = empty_gradients(QkvLayout.from_te(dqkv_layout), (q, k, v), fake_dtype)
    if not _covers_everything(parts):
        for gradient in gradients:
            gradient.zero_()
    formats = (layout.q_format, layout.kv_format, layout.kv_format)
    q_view, k_view, v_view = (heads_first(x, f) for x, f in zip((q, k, v), formats, strict=True))
    dq_view, dk_view, dv_view = (heads_first(x, f) for x, f in zip(gradients, formats, strict=True))
    o_view, do_view = heads_first(o, format_name(o_format)), heads_first(d_o, format_name(do_format))
    for index, part in enumerate(parts):
        dq, dk, dv = attention_blocks.backward(
            _working_copy(part.of_q(do_view)),
            _working_copy(part.of_q(q_view)),
            _working_copy(part.of_kv(k_view)),
            _working_copy(part.of_kv(v_view)),
            _working_copy(part.of_q(o_view)),
            part.of_q(lse),
            _segment_rules(rules, index),
        )
        part.of_q(dq_view).copy_(dq)
        part.of_kv(dk_view).copy_(dk)
        part.of_kv(dv_view).copy_(dv)
    return [*gradients, None, None]
