"""Granite 3 (dense), which has factors on embedding, scores, residual stream and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fp8.config.layout import head_size
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import GATED, Biases, Choice, Value, common_keys, mlp_key
from megatron_fp8.hf.mapping import HFSettings
from megatron_fp8.hf.rope_keys import Rope


@dataclass(frozen=True)
class _AttentionMultiplier:
    """The factor on scores, whose default here is no number but follows from the heads."""

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        return {"softmax_scale": settings.get("attention_multiplier", 1.0)}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        return {"attention_multiplier": model.softmax_scale or head_size(model) ** -0.5}


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
        _AttentionMultiplier(),
        Value("residual_multiplier", "residual_multiplier", 1.0),
        Value("logits_scaling", "logits_scaling", 1.0),
        Rope(),
    ),
    examples="Granite 3 (dense)",
)
