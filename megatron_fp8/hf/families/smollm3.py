"""SmolLM 3, every fourth of whose layers has no RoPE."""

from __future__ import annotations

from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import GATED, Biases, Choice, Heads, Value, common_keys, mlp_key
from megatron_fp8.hf.layer_keys import NoRope, WindowByLayer, lacks_rope
from megatron_fp8.hf.rope_keys import Rope

SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    keys=(
        *common_keys(32768, Heads(default_groups=4), tied=True),
        mlp_key(),
        Choice("hidden_act", "activation", GATED, "silu"),
        Value("rms_norm_eps", "norm_epsilon", 1e-6),
        Biases("attention_bias", "attention_bias", "mlp_bias"),
        NoRope(),
        WindowByLayer(lacks_rope, default=None, switch="use_sliding_window"),
        Rope(base=2000000.0),
    ),
    examples="SmolLM 3",
)
