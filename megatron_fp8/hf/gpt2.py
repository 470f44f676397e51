"""Expresses models as GPT-2 (LayerNorm, learned positions, biases): `config.json` and tensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_fp8.config.layout import head_size, mlp_size
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf.mapping import HFSettings, TensorGroup, require, same

MODEL_TYPE = "gpt2"
# Ours -> theirs; GELU is the tanh approximation, as Transformer Engine computes it.
_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu"}


def config_json(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The `config.json` of a model. Raises ConfigError with every key that GPT-2 cannot express."""
    heads = model.num_attention_heads
    require(
        {**model.model_dump(), "kv_channels": head_size(model)},
        {
            "normalization": ("LayerNorm",),
            "activation": tuple(_ACTIVATIONS),
            "add_bias_linear": (True,),
            "num_query_groups": (None, heads),
            "kv_channels": (model.hidden_size // heads,),
        },
        "GPT-2",
    )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": MODEL_TYPE,
        "vocab_size": vocab_size,
        "n_embd": model.hidden_size,
        "n_inner": mlp_size(model),
        "n_layer": model.num_layers,
        "n_head": heads,
        "n_positions": model.max_position_embeddings or model.seq_length,
        "activation_function": _ACTIVATIONS[model.activation],
        "embd_pdrop": model.hidden_dropout,
        "resid_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "initializer_range": model.init_method_std,
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


def model_values(settings: HFSettings) -> dict[str, Any]:
    """The `model` section for a `config.json`, without `seq_length`; `settings` collects mistakes."""
    hidden, dropout = settings.size("n_embd"), settings.get("resid_pdrop", 0.1)
    settings.only("embd_pdrop", dropout, 0.1, f"resid_pdrop is {dropout}, and model.hidden_dropout stands for both")
    settings.only("scale_attn_weights", True, True, "attention is always scaled")
    settings.only("scale_attn_by_inverse_layer_idx", False, False, "attention has the same scale in every layer")
    settings.only("add_cross_attention", False, False, "cross attention is not supported")
    activations = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}
    return {
        "num_layers": settings.size("n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": settings.size("n_head"),
        "ffn_hidden_size": settings.size("n_inner", 4 * hidden),
        "max_position_embeddings": settings.size("n_positions", 1024),
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": settings.get("layer_norm_epsilon", 1e-5),
        "activation": settings.choice("activation_function", {**activations, "gelu_pytorch_tanh": "gelu"}, "gelu_new"),
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": not settings.get("tie_word_embeddings", True),
        "hidden_dropout": dropout,
        "attention_dropout": settings.get("attn_pdrop", 0.1),
        "init_method_std": settings.get("initializer_range", 0.02),
        "vocab_size": settings.size("vocab_size"),
    }


def tensor_groups(model: ModelConfig, vocab_size: int) -> Iterator[TensorGroup]:
    """All tensors of the model, in forward order."""
    hidden = model.hidden_size
    num_positions = model.max_position_embeddings or model.seq_length
    yield same("embedding.word_embeddings.weight", "transformer.wte.weight", vocab_size, hidden)
    yield same("embedding.position_embeddings.weight", "transformer.wpe.weight", num_positions, hidden)
    for index in range(model.num_layers):
        yield from _layer(model, f"layers.{index}", f"transformer.h.{index}")
    for kind in ("weight", "bias"):
        yield same(f"final_norm.{kind}", f"transformer.ln_f.{kind}", hidden)
    if model.untie_embeddings_and_output_weights:
        yield same("output_layer.weight", "lm_head.weight", vocab_size, hidden)


def _layer(model: ModelConfig, ours: str, theirs: str) -> Iterator[TensorGroup]:
    hidden, ffn = model.hidden_size, mlp_size(model)
    qkv, mlp = f"{ours}.self_attention.layernorm_qkv", f"{ours}.layernorm_mlp"
    for kind in ("weight", "bias"):
        yield same(f"{qkv}.layer_norm_{kind}", f"{theirs}.ln_1.{kind}", hidden)
        yield same(f"{mlp}.layer_norm_{kind}", f"{theirs}.ln_2.{kind}", hidden)
        names = tuple(f"{qkv}.{part}_{kind}" for part in ("query", "key", "value"))
        shape = (hidden, hidden) if kind == "weight" else (hidden,)
        yield TensorGroup(
            (f"{qkv}.{kind}",) if model.fuse_qkv_params else names,
            (f"{theirs}.attn.c_attn.{kind}",),
            (shape, shape, shape),
            num_blocks=model.num_attention_heads,
            transposed=True,
        )
    yield from _linear(f"{ours}.self_attention.proj.", f"{theirs}.attn.c_proj", hidden, hidden)
    yield from _linear(f"{mlp}.fc1_", f"{theirs}.mlp.c_fc", ffn, hidden)
    yield from _linear(f"{mlp}.fc2_", f"{theirs}.mlp.c_proj", hidden, ffn)


def _linear(ours: str, theirs: str, out_features: int, in_features: int) -> Iterator[TensorGroup]:
    weight = (out_features, in_features)
    yield TensorGroup((f"{ours}weight",), (f"{theirs}.weight",), (weight,), transposed=True)
    yield same(f"{ours}bias", f"{theirs}.bias", out_features)
