"""Fused attention of `transformer_engine_torch`, forward and backward.

TE's argument lists, and the tensors saved for the backward pass. Arithmetic is FP32 and results are rounded once; the
work itself is in `attention_blocks`, layouts are in `attention_layout`, what cuDNN takes in `attention_support`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_fp8.cpu.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_Softmax_Type
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

__all__ = ["fused_attn_bwd", "fused_attn_fwd"]


def _require_supported(bias_type: Any, options: dict[str, bool]) -> None:
    refused = [name for name, used in options.items() if used]
    if int(bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS:
        refused.append(NVTE_Bias_Type(int(bias_type)).name)
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
    return replace(rules, dropout_seed=rules.dropout_seed + index)


def _sinks(softmax_type: Any, offset: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """Each head's score `[heads]` of a sink, a key without a value; None for the plain softmax.

    cuDNN reads the offset's memory as FP32, one number a head. Raises ValueError where it would read other numbers.
    """
    kind = NVTE_Softmax_Type(int(softmax_type))
    if kind == NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX:
        return None
    if offset is None:
        raise ValueError(f"{kind.name} needs softmax_offset, FP32 [1, {heads}, 1, 1]")
    if offset.dtype != torch.float32 or tuple(offset.shape) != (1, heads, 1, 1):
        found = f"{offset.dtype} {list(offset.shape)}"
        raise ValueError(f"softmax_offset must be FP32 [1, {heads}, 1, 1], not {found}")
    return offset.detach().flatten()


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
    softmax_offset: torch.Tensor | None,
    rng_gen: torch.Generator | None,
    rng_elts_per_thread: int,  # noqa: ARG001
    return_max_logit: bool,
    cuda_graph: bool,  # noqa: ARG001
) -> list[torch.Tensor]:
    """`softmax(mask(attn_scale * q k^T)) v` within each sequence, with dropout of probabilities.

    With a softmax_offset, FP32 `[1, h, 1, 1]`, one more key of that score and without a value takes its share.

    q: `[s, b, h, d]`, `[b, s, h, d]` or `[t, h, d]` as qkv_layout says, of any stride; k, v alike with their
    own number of heads, of which h is a multiple. fake_dtype: dtype of the output.
    Returns `[out, softmax_lse, rng_state]`, and softmax_offset where there is one. out: o_format, contiguous, zero
    where padded. softmax_lse: FP32 natural log-sum-exp of scaled scores and offset, `[b, h, sq, 1]`, for `thd`
    `[t, h, 1]`. rng_state: int64 `[seed, offset]`. Without `is_training` only out matters, and TE drops the rest.
    """
    del is_training
    _require_supported(
        bias_type,
        {
            "paged KV cache": page_table_k is not None or page_table_v is not None,
            "FP8": s_quantizer is not None or o_quantizer is not None,
            "return_max_logit": return_max_logit,
        },
    )
    mask, padded = _mask(attn_mask_type, window_size, bottom_right_diagonal)
    rng_state = _draw_rng_state(p_dropout, rng_gen)
    layout = QkvLayout.from_te(qkv_layout)
    sinks = _sinks(softmax_type, softmax_offset, q.shape[-2])
    rules = ScoreRules(attn_scale, mask, p_dropout, int(rng_state[0]), sinks)
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
    offsets = [] if sinks is None or softmax_offset is None else [softmax_offset]
    return [out, _lse_to_te(lse, layout.q_format), rng_state, *offsets]


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

    aux_ctx_tensors: what the forward pass returned after its output; o, d_o: that output and the gradient of it, in
    o_format and do_format. Returns `[dq, dk, dv, None, d_offset]`: the first three in fake_dtype, of the shapes of q,
    k, v and packed in memory as dqkv_layout says, zero where padded; the fourth would be of a bias; d_offset FP32
    `[1, h, 1, 1]`, None for the plain softmax.
    """
    quantizers = (s_quantizer, dp_quantizer, dqkv_quantizer)
    _require_supported(bias_type, {"FP8": any(x is not None for x in quantizers)})
    mask, padded = _mask(attn_mask_type, window_size, bottom_right_diagonal)
    layout = QkvLayout.from_te(qkv_layout)
    lse = _lse_from_te(aux_ctx_tensors[0], layout.q_format)
    sinks = _sinks(softmax_type, aux_ctx_tensors[2] if len(aux_ctx_tensors) > 2 else None, q.shape[-2])
    rules = ScoreRules(attn_scale, mask, p_dropout, int(aux_ctx_tensors[1][0]), sinks)
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
    d_sinks = None if sinks is None else torch.zeros_like(sinks)
    for index, part in enumerate(parts):
        part_grad, part_out = _working_copy(part.of_q(do_view)), _working_copy(part.of_q(o_view))
        dq, dk, dv = attention_blocks.backward(
            part_grad,
            _working_copy(part.of_q(q_view)),
            _working_copy(part.of_kv(k_view)),
            _working_copy(part.of_kv(v_view)),
            part_out,
            part.of_q(lse),
            _segment_rules(rules, index),
        )
        part.of_q(dq_view).copy_(dq)
        part.of_kv(dk_view).copy_(dk)
        part.of_kv(dv_view).copy_(dv)
        if sinks is not None and d_sinks is not None:
            d_sinks += attention_blocks.sink_gradient(part_grad, part_out, part.of_q(lse), sinks)
    return [*gradients, None, None if d_sinks is None else d_sinks.view(1, -1, 1, 1)]
