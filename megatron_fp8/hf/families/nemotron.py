"""Nemotron and Minitron (dense): LayerNorm centered at 0, squared ReLU, half of each head rotated."""

from __future__ import annotations

from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import PLAIN, Biases, Choice, Fixed, Value, common_keys, mlp_key
from megatron_fp8.hf.rope_keys import Rope
from megatron_fp8.hf.tensor_names import TensorNames

NEMOTRON = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    keys=(
        *common_keys(4096, std=0.0134),
        mlp_key(),
        Choice("hidden_act", "activation", PLAIN, "relu2"),
        Fixed({"normalization": "LayerNorm", "layernorm_zero_centered_gamma": True}),
        Value("norm_eps", "norm_epsilon", 1e-5),
        Biases("attention_bias", "attention_bias", "mlp_bias"),
        Rope(share=0.5, partial=True),
    ),
    names=TensorNames(fc1=("mlp.up_proj",)),
    examples="Nemotron, Minitron (dense)",
)
