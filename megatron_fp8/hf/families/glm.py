"""GLM-4: interleaved RoPE on half of each head; that of 0414 (`glm4`) also normalizes outputs."""

from __future__ import annotations

from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import GATED, Biases, Choice, Fixed, Heads, Value, common_keys, mlp_key
from megatron_fp8.hf.rope_keys import Rope
from megatron_fp8.hf.tensor_names import TensorNames

_SHARED = (
    *common_keys(131072, Heads(default_groups=2, default_head_dim=128)),
    mlp_key(),
    Choice("hidden_act", "activation", GATED, "silu"),
    Value("rms_norm_eps", "norm_epsilon", 1.5625e-07),
    Biases("attention_bias", False, False, {"attention_bias": True}),
    Rope(share=0.5, partial=True, interleaved=True),
)
GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    keys=_SHARED,
    names=TensorNames(fc1=("mlp.gate_up_proj",)),
    examples="GLM-4 9B, GLM-Edge",
)
GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    keys=(*_SHARED, Fixed({"norm_placement": "pre_and_post"})),
    names=TensorNames(
        fc1=("mlp.gate_up_proj",), post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"
    ),
    examples="GLM-4 0414",
)
