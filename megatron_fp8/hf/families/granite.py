"""Granite 3 (dense), which has factors on embedding, scores, residual stream and logits."""

from __future__ import annotations

from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import GATED, Biases, Choice, Value, common_keys, mlp_key
from megatron_fp8.hf.rope_keys import Rope

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    keys=(
        *common_keys(2048),
        mlp_key(),
        Choice("hidden_act", "activation", GATED, "silu"),
        Value("rms_norm_eps", "norm_epsilon", 1e-6),
        Biases("attention_bias", "attention_bias", "mlp_bias"),
        Value("embedding_multiplier", "embedding_multiplier", 1.0),
        Value("attention_multiplier", "softmax_scale", 1.0),
        Value("residual_multiplier", "residual_multiplier", 1.0),
        Value("logits_scaling", "logits_scaling", 1.0),
        Rope(),
    ),
    examples="Granite 3 (dense)",
)
