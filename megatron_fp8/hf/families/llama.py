"""Llama 1 to 3.3, and what shares its class: SmolLM 2, Yi, Minitron's Llama models."""

from __future__ import annotations

from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import GATED, Biases, Choice, Heads, Value, common_keys, mlp_key
from megatron_fp8.hf.rope_keys import Rope

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=(
        *common_keys(2048, Heads(divides=True)),
        mlp_key(),
        Choice("hidden_act", "activation", GATED, "silu"),
        Value("rms_norm_eps", "norm_epsilon", 1e-6),
        Biases("attention_bias", "attention_bias", "mlp_bias"),
        Rope(),
    ),
    examples="Llama 1, 2, 3, 3.1, 3.2 (text), 3.3; SmolLM 2",
)
