"""Qwen 2 and 2.5, whose biases are on QKV alone, and Qwen 3, which normalizes queries and keys of each head."""

from __future__ import annotations

from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import GATED, Biases, Choice, Fixed, Heads, Value, common_keys, mlp_key
from megatron_fp8.hf.layer_keys import WindowByLayer
from megatron_fp8.hf.mapping import HFSettings
from megatron_fp8.hf.rope_keys import Rope


def _windows_come_last(settings: HFSettings, layer: int) -> bool:
    return layer >= settings.count("max_window_layers", 28)


_SHARED = (
    mlp_key(),
    Choice("hidden_act", "activation", GATED, "silu"),
    Value("rms_norm_eps", "norm_epsilon", 1e-6),
    WindowByLayer(_windows_come_last, switch="use_sliding_window"),
    Rope(),
)
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=(*common_keys(32768, Heads(default_groups=32)), *_SHARED, Biases(True, False, False)),
    examples="Qwen 2, Qwen 2.5",
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=(
        *common_keys(32768, Heads(default_groups=32, default_head_dim=128)),
        *_SHARED,
        Biases("attention_bias", "attention_bias", False),
        Fixed({"qk_layernorm": "per_head"}),
    ),
    examples="Qwen 3 (dense)",
)
