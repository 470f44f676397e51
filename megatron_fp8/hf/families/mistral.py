"""Mistral 7B and Nemo."""

from __future__ import annotations

from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import GATED, Biases, Choice, Heads, Value, common_keys, mlp_key
from megatron_fp8.hf.layer_keys import WindowOfAll
from megatron_fp8.hf.rope_keys import Rope

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=(
        *common_keys(4096 * 32, Heads(default_groups=8)),
        mlp_key(),
        Choice("hidden_act", "activation", GATED, "silu"),
        Value("rms_norm_eps", "norm_epsilon", 1e-6),
        Biases(False, False, False),
        WindowOfAll(4096),
        Rope(),
    ),
    examples="Mistral 7B, Mistral Nemo",
)
