"""OLMo 1, whose norms learn nothing, and OLMo 2, which normalizes outputs, and all heads' queries and keys."""

from __future__ import annotations

from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import GATED, Biases, Choice, Fixed, Only, Value, common_keys, mlp_key
from megatron_fp8.hf.rope_keys import Rope
from megatron_fp8.hf.tensor_names import TensorNames

_SHARED = (
    *common_keys(2048),
    mlp_key(),
    Choice("hidden_act", "activation", GATED, "silu"),
    Biases("attention_bias", "attention_bias", False),
    Rope(),
)
OLMO = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    keys=(
        *_SHARED,
        Fixed({"normalization": "LayerNorm", "norm_affine": False, "norm_epsilon": 1e-5}),
        Only({"clip_qkv": None}, "queries, keys and values are never clipped here"),
    ),
    examples="OLMo 1",
)
OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    keys=(
        *_SHARED,
        Fixed({"norm_placement": "post", "qk_layernorm": "all_heads"}),
        Value("rms_norm_eps", "norm_epsilon", 1e-5),
    ),
    names=TensorNames(post_attention_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm"),
    examples="OLMo 2",
)
