"""Expresses models as Llama (RMSNorm, gated MLP, RoPE, grouped queries): `config.json` and tensors. Imports no torch.

Both sides rotate halves of a head in RoPE, so no rows are permuted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_fp8.config.layout import head_size, mlp_size, query_groups
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf.mapping import HFSettings, TensorGroup, require, same

MODEL_TYPE = "llama"
# Ours -> the gate's activation; GELU is the tanh approximation, as Transformer Engine computes it.
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "reglu": "relu"}


def config_json(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The `config.json` of a model. Raises ConfigError with every key that Llama cannot express."""
    require(
        model.model_dump(),
        {
            "normalization": ("RMSNorm",),
            "activation": tuple(_ACTIVATIONS),
            "rotary_percent": (1.0,),
        },
        "Llama",
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": MODEL_TYPE,
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": mlp_size(model),
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": query_groups(model),
        "head_dim": head_size(model),
        "hidden_act": _ACTIVATIONS[model.activation],
        "max_position_embeddings": model.max_position_embeddings or model.seq_length,
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.norm_epsilon,
        # transformers before version 5 read the first, later ones the second.
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "attention_bias": model.add_bias_linear,
        "mlp_bias": model.add_bias_linear,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


def model_values(settings: HFSettings) -> dict[str, Any]:
    """The `model` section for a `config.json`, without `seq_length`; `settings` collects mistakes."""
    heads, hidden = settings.size("num_attention_heads"), settings.size("hidden_size")
    bias = bool(settings.get("attention_bias", False))
    settings.only("mlp_bias", bias, False, f"attention_bias is {bias}, and model.add_bias_linear stands for both")
    activations = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}
    return {
        "num_layers": settings.size("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": settings.size("num_key_value_heads", heads),
        "kv_channels": settings.size("head_dim", max(hidden // heads, 1)),
        "ffn_hidden_size": settings.size("intermediate_size"),
        "max_position_embeddings": settings.size("max_position_embeddings", 2048),
        "position_embedding_type": "rope",
        "rotary_base": _rope_base(settings),
        "normalization": "RMSNorm",
        "norm_epsilon": settings.get("rms_norm_eps", 1e-6),
        "activation": settings.choice("hidden_act", activations, "silu"),
        "add_bias_linear": bias,
        "untie_embeddings_and_output_weights": not settings.get("tie_word_embeddings", False),
        "attention_dropout": settings.get("attention_dropout", 0.0),
        "init_method_std": settings.get("initializer_range", 0.02),
        "vocab_size": settings.size("vocab_size"),
    }


def tensor_groups(model: ModelConfig, vocab_size: int) -> Iterator[TensorGroup]:
    """All tensors of the model, in forward order."""
    hidden = model.hidden_size
    yield same("embedding.word_embeddings.weight", "model.embed_tokens.weight", vocab_size, hidden)
    for index in range(model.num_layers):
        yield from _layer(model, f"layers.{index}", f"model.layers.{index}")
    yield same("final_norm.weight", "model.norm.weight", hidden)
    if model.untie_embeddings_and_output_weights:
        yield same("output_layer.weight", "lm_head.weight", vocab_size, hidden)


def _layer(model: ModelConfig, ours: str, theirs: str) -> Iterator[TensorGroup]:
    hidden, ffn, groups = model.hidden_size, mlp_size(model), query_groups(model)
    queries, keys = model.num_attention_heads * head_size(model), groups * head_size(model)
    qkv, mlp = f"{ours}.self_attention.layernorm_qkv", f"{ours}.layernorm_mlp"
    yield same(f"{qkv}.layer_norm_weight", f"{theirs}.input_layernorm.weight", hidden)
    for kind, columns in _kinds(model, hidden):
        names = tuple(f"{qkv}.{part}_{kind}" for part in ("query", "key", "value"))
        yield TensorGroup(
            (f"{qkv}.{kind}",) if model.fuse_qkv_params else names,
            tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv"),
            ((queries, *columns), (keys, *columns), (keys, *columns)),
            num_blocks=groups,
        )
    for kind, columns in _kinds(model, queries):
        yield same(f"{ours}.self_attention.proj.{kind}", f"{theirs}.self_attn.o_proj.{kind}", hidden, *columns)
    yield same(f"{mlp}.layer_norm_weight", f"{theirs}.post_attention_layernorm.weight", hidden)
    for kind, columns in _kinds(model, hidden):
        gate_up = (f"{theirs}.mlp.gate_proj.{kind}", f"{theirs}.mlp.up_proj.{kind}")
        yield TensorGroup((f"{mlp}.fc1_{kind}",), gate_up, ((ffn, *columns), (ffn, *columns)))
    for kind, columns in _kinds(model, ffn):
        yield same(f"{mlp}.fc2_{kind}", f"{theirs}.mlp.down_proj.{kind}", hidden, *columns)


def _kinds(model: ModelConfig, in_features: int) -> list[tuple[str, tuple[int, ...]]]:
    """(weight or bias, its axes after the rows) of a linear layer."""
    return [("weight", (in_features,)), *([("bias", ())] if model.add_bias_linear else [])]


def _rope_base(settings: HFSettings) -> float:
    """RoPE's base; scaled and partial RoPE are rejected."""
    key = "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"
    rope = settings.get(key, {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        settings.reject(f"{key}.rope_type", kind, "RoPE scaling is not supported", "a model without RoPE scaling")
    share = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        reason = "Llama rotates whole heads"
        settings.reject("partial_rotary_factor", share, reason, "a model with partial_rotary_factor=1.0")
    return float(rope.get("rope_theta", settings.get("rope_theta", 10000.0)))
