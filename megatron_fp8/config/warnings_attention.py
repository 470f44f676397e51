"""Warns of attention that GPUs do not fuse, with the memory that its scores take. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.attention import (
    HOPPER_ATTENTION,
    Cause,
    in_documents,
    kept_score_bytes,
    unfused_attention,
)
from megatron_fp8.config.layout import Layout
from megatron_fp8.config.load import LoadedConfig
from megatron_fp8.config.problem import Problem

# Of scores a layer: as much as no GPU feels.
_FEW_BYTES = 64 * 2**20
_WHY_UNFUSED = {
    Cause.FP32: (
        "on GPUs FP32 attention is not fused",
        "precision.mode=bf16, whose attention keeps no scores",
    ),
    Cause.SOFTCAP: (
        "on GPUs attention with a soft cap is not fused",
        "model.attn_logit_softcapping=null for a model of your own, or shorter samples, or more tensor parallelism",
    ),
    Cause.WINDOW_AND_DROPOUT: (
        "on GPUs attention with a window is not fused with dropout",
        "model.attention_dropout=0",
    ),
    Cause.HEAD_SIZE: (
        "on GPUs attention is fused for heads of up to 256 features, divisible by 8",
        "model.kv_channels=128",
    ),
    Cause.SINKS: (
        "on GPUs attention with sinks is not fused where documents are kept apart or determinism is asked for",
        "data.reset_attention_mask=false and training.deterministic_mode=false",
    ),
    Cause.DETERMINISM: (
        "on H100 and H200 deterministic attention with separated documents is not fused with {heads} heads a rank and "
        "model.seq_length={s}",
        "data.reset_attention_mask=false, or shorter samples, or more tensor parallelism",
    ),
}


def unfused_attention_warnings(loaded: LoadedConfig, layout: Layout) -> Iterator[Problem]:
    """Scores that are tensors on GPUs, of which the softmax's results wait for the backward pass."""
    config = loaded.config
    unfused = unfused_attention(config, layout, HOPPER_ATTENTION)
    if unfused is None:
        return
    apart = config.data.reset_attention_mask
    size = kept_score_bytes(config, layout, documents=unfused.beyond + 1)
    if size < _FEW_BYTES:
        return
    kept = f"keeps {'at least ' if apart else ''}{size / 2**30:,.1f} GiB of scores a layer"
    key = unfused.cause.value
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    why, use = _WHY_UNFUSED[unfused.cause]
    heads, s = layout.attention_heads_per_rank, layout.seq_length
    many = "" if unfused.is_certain else f" with more than {in_documents(unfused.beyond)}"
    shape = f" ({layout.micro_batch_size} x {heads} heads x {s} x {s} x 4 bytes)" if unfused.cause is Cause.FP32 else ""
    reason = f"{why.format(heads=heads, s=s)}: a micro-batch{many} {kept}{shape}"
    yield Problem(key, value, reason, use, loaded.origins[key])
