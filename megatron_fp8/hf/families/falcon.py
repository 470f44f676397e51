"""Falcon, new (40B, 180B, 11B) and old (7B, RW): QKV by query group, attention and MLP in parallel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fp8.config.layout import query_groups
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import PLAIN, Biases, Choice, Dropout, Fixed, Heads, MlpOfWidth, Only, Value, common_keys
from megatron_fp8.hf.mapping import HFSettings
from megatron_fp8.hf.rope_keys import Rope
from megatron_fp8.hf.tensor_names import TensorNames


@dataclass(frozen=True)
class _Architecture:
    """Groups, and how attention and MLP go together; a model of one group is the old one with `multi_query`."""

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        heads = settings.size("num_attention_heads")
        is_new = settings.flag("new_decoder_architecture", False)
        groups = settings.size("num_kv_heads", heads)
        norms = settings.size("num_ln_in_parallel_attn", 2)
        is_parallel, multi_query = settings.flag("parallel_attn", True), settings.flag("multi_query", True)
        if is_new:
            form = "separate_norms" if norms == 2 else "shared_norm"
        else:
            groups = 1 if multi_query else heads
            form = "shared_norm" if is_parallel else "none"
        return {"num_query_groups": groups, "parallel_attention_mlp": form}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        groups, form = query_groups(model), model.parallel_attention_mlp
        is_new = form == "separate_norms" or (form == "shared_norm" and groups != 1)
        theirs: dict[str, Any] = {"new_decoder_architecture": is_new, "num_kv_heads": groups}
        if is_new:
            return {**theirs, "num_ln_in_parallel_attn": 2 if form == "separate_norms" else 1, "parallel_attn": True}
        return {**theirs, "multi_query": groups == 1, "parallel_attn": form != "none"}


def _names(model: ModelConfig) -> TensorNames:
    separate = model.parallel_attention_mlp == "separate_norms"
    return TensorNames(
        embedding="transformer.word_embeddings",
        layer="transformer.h.{}",
        pre_attention_norm="ln_attn" if separate else "input_layernorm",
        qkv=("self_attention.query_key_value",),
        qkv_by_group=True,
        proj="self_attention.dense",
        pre_mlp_norm="ln_mlp" if separate else "post_attention_layernorm",
        fc1=("mlp.dense_h_to_4h",),
        fc2="mlp.dense_4h_to_h",
        final_norm="transformer.ln_f",
    )


FALCON = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    keys=(
        *common_keys(2048, Heads(groups="", head_dim=""), tied=True),
        _Architecture(),
        MlpOfWidth("ffn_hidden_size", "hidden_size"),
        Choice("activation", "activation", PLAIN, "gelu"),
        Fixed({"normalization": "LayerNorm"}),
        Value("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Biases("bias", "bias", "bias"),
        Dropout(("hidden_dropout",)),
        Only({"alibi": False}, "ALiBi is not supported"),
        Rope(),
    ),
    names=_names,
    examples="Falcon 7B, 40B, 180B, Falcon 2 11B",
    harmless=frozenset({"apply_residual_connection_post_layernorm"}),
)
