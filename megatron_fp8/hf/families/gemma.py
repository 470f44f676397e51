"""Gemma 1, 2 and 3 (text): norms centered at 0, embeddings times the root of the width, windows, caps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fp8.config.layout import head_size
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import GATED, Biases, Choice, Fixed, Heads, Only, Value, common_keys, mlp_key
from megatron_fp8.hf.layer_keys import WindowByLayer
from megatron_fp8.hf.mapping import HFSettings
from megatron_fp8.hf.rope_keys import Rope, read_scaling, write_scaling
from megatron_fp8.hf.tensor_names import TensorNames


@dataclass(frozen=True)
class _Scales:
    """The factor on embeddings, which the width gives, and that on scores."""

    has_query_scale: bool

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        ours: dict[str, Any] = {"embedding_multiplier": settings.size("hidden_size") ** 0.5}
        if self.has_query_scale:
            ours["softmax_scale"] = settings.size("query_pre_attn_scalar", 256) ** -0.5
        return ours

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        scale = model.softmax_scale or head_size(model) ** -0.5
        return {"query_pre_attn_scalar": round(scale**-2)} if self.has_query_scale else {}


@dataclass(frozen=True)
class _TwoRopes:
    """Gemma 3's RoPE: scaled, and with another base, in the layers without a window."""

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        now = settings.mapping("rope_parameters")
        kinds = HFSettings(now, "rope_parameters")
        full = kinds.mapping("full_attention") | settings.mapping("rope_scaling")
        sliding = kinds.mapping("sliding_attention")
        settings.problems += kinds.problems
        base, local = settings.get("rope_theta", 1_000_000.0), settings.get("rope_local_base_freq", 10_000.0)
        ours = {
            "position_embedding_type": "rope",
            "rotary_base": full.pop("rope_theta", base),
            "rotary_base_local": sliding.pop("rope_theta", local),
        }
        if sliding.pop("rope_type", "default") != "default" or sliding:
            reason = "only RoPE without scaling is supported there"
            settings.reject("rope_parameters.sliding_attention", sliding, reason, "a model with its default")
        if rest := now.keys() - {"full_attention", "sliding_attention"}:
            reason = "it is of neither kind of layer"
            settings.reject("rope_parameters", sorted(rest), reason, "full_attention and sliding_attention")
        return ours | read_scaling(settings, "rope_parameters.full_attention", full)

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        local = model.rotary_base_local or model.rotary_base
        full = write_scaling(model) | {"rope_theta": model.rotary_base}
        theirs = {
            "rope_theta": model.rotary_base,
            "rope_local_base_freq": local,
            "rope_parameters": {
                "full_attention": full,
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
        }
        return theirs | ({"rope_scaling": full} if full["rope_type"] != "default" else {})


def _every_other(settings: HFSettings, layer: int) -> bool:
    del settings
    return (layer + 1) % 2 != 0


def _all_but_every_nth(settings: HFSettings, layer: int) -> bool:
    return (layer + 1) % settings.size("sliding_window_pattern", 6) != 0


def _keys(positions: int, groups: int, head_dim: int, divides: bool) -> tuple[Any, ...]:
    heads = Heads(default_groups=groups, default_head_dim=head_dim, divides=divides)
    return (
        *common_keys(positions, heads, tied=True),
        mlp_key(),
        Value("rms_norm_eps", "norm_epsilon", 1e-6),
        Fixed({"layernorm_zero_centered_gamma": True}),
        Biases("attention_bias", "attention_bias", False),
    )


_SANDWICH = TensorNames(
    post_attention_norm="post_attention_layernorm",
    pre_mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
# In Gemma 1's files `gelu` means the approximation, as transformers reads it.
_LEGACY = {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}

GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    keys=(
        *_keys(8192, 16, 256, divides=False),
        Choice("hidden_act", "activation", {**GATED, **_LEGACY}, "gelu_pytorch_tanh"),
        Only({"hidden_activation": "gelu_pytorch_tanh"}, "the class reads hidden_act"),
        _Scales(has_query_scale=False),
        Rope(),
    ),
    examples="Gemma 1",
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    keys=(
        *_keys(8192, 4, 256, divides=True),
        Choice("hidden_activation", "activation", GATED, "gelu_pytorch_tanh"),
        Fixed({"norm_placement": "pre_and_post"}),
        _Scales(has_query_scale=True),
        Value("attn_logit_softcapping", "attn_logit_softcapping", 50.0, nullable=True),
        Value("final_logit_softcapping", "final_logit_softcapping", 30.0, nullable=True),
        WindowByLayer(_every_other),
        Rope(),
    ),
    names=_SANDWICH,
    examples="Gemma 2",
    harmless=frozenset({"hidden_act", "cache_implementation"}),
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys=(
        *_keys(131_072, 4, 256, divides=True),
        Choice("hidden_activation", "activation", GATED, "gelu_pytorch_tanh"),
        Fixed({"norm_placement": "pre_and_post", "qk_layernorm": "per_head"}),
        _Scales(has_query_scale=True),
        Value("attn_logit_softcapping", "attn_logit_softcapping", None, nullable=True),
        Value("final_logit_softcapping", "final_logit_softcapping", None, nullable=True),
        WindowByLayer(_all_but_every_nth),
        _TwoRopes(),
    ),
    names=_SANDWICH,
    examples="Gemma 3 (text)",
    # Before layer_types there was one number, which transformers keeps beside the list.
    harmless=frozenset({"sliding_window_pattern", "_sliding_window_pattern"}),
)
