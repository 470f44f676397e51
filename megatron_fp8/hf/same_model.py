"""Says whether two `model` sections are the same model, however they are written. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_fp8.config.layer_kinds import (
    has_rope,
    mlp_has_bias,
    original_length,
    qkv_has_bias,
    rope_attention_factor,
    uses_local_rope,
    window_of,
)
from megatron_fp8.config.layout import head_size, mlp_size, query_groups
from megatron_fp8.config.schema import ModelConfig

# Of a run, or of how the weights are stored; dropout is none of what a trained model computes.
_NOT_THE_MODEL = (
    *("seq_length", "fuse_qkv_params", "vocab_size", "make_vocab_size_divisible_by", "hf_model_type"),
    *("recompute_granularity", "recompute_num_layers", "hidden_dropout", "attention_dropout", "init_method_std"),
)
_OF_SCALING = {
    "linear": ("rope_scaling_factor",),
    "dynamic": ("rope_scaling_factor", "original_max_position_embeddings"),
    "llama3": (
        *("rope_scaling_factor", "original_max_position_embeddings"),
        *("rope_low_freq_factor", "rope_high_freq_factor"),
    ),
    "yarn": (
        *("rope_scaling_factor", "original_max_position_embeddings", "rope_attention_factor"),
        *("rope_beta_fast", "rope_beta_slow", "rope_truncate"),
    ),
    "longrope": (
        *("original_max_position_embeddings", "rope_attention_factor", "rope_short_factor", "rope_long_factor"),
    ),
    "none": (),
}


def differing_keys(model: ModelConfig, other: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, other value) of what makes another model."""
    ours, others = _spelled_out(model), _spelled_out(other)
    for key in ours:
        if ours[key] != others[key]:
            shown = getattr(model, key), getattr(other, key)
            yield key, *(shown if shown[0] != shown[1] else (ours[key], others[key]))


def _spelled_out(model: ModelConfig) -> dict[str, Any]:
    """Every value with its default filled in; None for what has no effect."""
    layers = range(model.num_layers)
    values = {key: value for key, value in model.model_dump().items() if key not in _NOT_THE_MODEL}
    values |= {
        "num_query_groups": query_groups(model),
        "kv_channels": head_size(model),
        "ffn_hidden_size": mlp_size(model),
        "max_position_embeddings": model.max_position_embeddings or model.seq_length,
        "add_qkv_bias": qkv_has_bias(model),
        "add_mlp_bias": mlp_has_bias(model),
        "softmax_scale": None if model.softmax_scale == head_size(model) ** -0.5 else model.softmax_scale,
        "window_size": [window_of(model, layer) for layer in layers],
        "window_attn_skip_freq": None,
        "no_rope_freq": [has_rope(model, layer) for layer in layers],
        "original_max_position_embeddings": original_length(model),
        "rope_attention_factor": rope_attention_factor(model),
    }
    kept = _OF_SCALING[model.rope_scaling_type]
    has_any_rope = model.position_embedding_type == "rope"
    for key in values:
        scaling = key.startswith("rope_") or key == "original_max_position_embeddings"
        if (scaling and key not in (*kept, "rope_scaling_type")) or (key.startswith("rotary_") and not has_any_rope):
            values[key] = None
    if not any(uses_local_rope(model, layer) for layer in layers):
        values["rotary_base_local"] = None
    return values
