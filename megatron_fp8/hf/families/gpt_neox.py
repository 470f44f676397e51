"""GPT-NeoX and Pythia: attention and MLP in parallel, QKV stacked by head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import PLAIN, Biases, Choice, Dropout, Fixed, Heads, Value, common_keys, mlp_key
from megatron_fp8.hf.mapping import HFSettings
from megatron_fp8.hf.rope_keys import Rope
from megatron_fp8.hf.tensor_names import TensorNames


@dataclass(frozen=True)
class _ParallelResidual:
    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        return {"parallel_attention_mlp": "separate_norms" if settings.flag("use_parallel_residual", True) else "none"}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        return {"use_parallel_residual": model.parallel_attention_mlp == "separate_norms"}


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    keys=(
        *common_keys(2048, Heads(groups="", head_dim="")),
        mlp_key(),
        Choice("hidden_act", "activation", PLAIN, "gelu"),
        Fixed({"normalization": "LayerNorm"}),
        Value("layer_norm_eps", "norm_epsilon", 1e-5),
        Biases("attention_bias", "attention_bias", True, {"attention_bias": True}),
        Dropout(("hidden_dropout",)),
        _ParallelResidual(),
        Rope(share=0.25, partial=True, base_key="rotary_emb_base", share_key="rotary_pct"),
    ),
    names=TensorNames(
        embedding="gpt_neox.embed_in",
        layer="gpt_neox.layers.{}",
        qkv=("attention.query_key_value",),
        qkv_by_group=True,
        proj="attention.dense",
        fc1=("mlp.dense_h_to_4h",),
        fc2="mlp.dense_4h_to_h",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
    ),
    examples="GPT-NeoX 20B, Pythia",
)
