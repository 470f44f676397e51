"""`checkpoint.load_weights_only` refuses what gives parameters other names or shapes, and says what else differs."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megatron_fp8.config.layout import shape_of_weights
from megatron_fp8.config.resume_check import compare_with_saved
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf.tensor_names import TensorNames, tensor_groups
from tests.small_run import small_config

LEARNED = {"position_embedding_type": "learned_absolute"}
CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"seq_length": 64}),
    ({}, {"max_position_embeddings": 64}),
    (LEARNED, {"seq_length": 64}),
    (LEARNED, {"max_position_embeddings": 64}),
    (LEARNED, {"max_position_embeddings": 32}),
    ({}, LEARNED),
    ({}, {"rotary_base": 500.0}),
    ({}, {"rotary_percent": 0.5}),
    ({}, {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0}),
    ({}, {"no_rope_freq": [2]}),
    ({}, {"norm_epsilon": 1e-6}),
    ({}, {"normalization": "LayerNorm"}),
    ({}, {"norm_affine": False}),
    ({}, {"norm_placement": "post"}),
    ({}, {"qk_layernorm": "per_head"}),
    ({"qk_layernorm": "per_head"}, {"qk_layernorm": "per_head_after_rope"}),
    ({}, {"activation": "geglu"}),
    ({}, {"activation": "srelu"}),
    ({}, {"activation": "exact_geglu"}),
    ({}, {"add_qkv_bias": True}),
    ({}, {"add_qkv_bias": False}),
    ({}, {"add_mlp_bias": True}),
    ({}, {"add_output_bias": True}),
    ({}, {"parallel_attention_mlp": "separate_norms"}),
    ({}, {"parallel_attention_mlp": "shared_norm"}),
    ({}, {"window_size": [3, 0]}),
    ({}, {"softmax_scale": 0.5}),
    ({}, {"num_query_groups": 2}),
    ({"num_query_groups": None}, {"num_query_groups": 8}),
    ({}, {"kv_channels": 8}),
    ({}, {"kv_channels": 16}),
    ({}, {"fuse_qkv_params": False}),
    ({}, {"untie_embeddings_and_output_weights": False}),
]


def tensors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters."""
    names = TensorNames(positions="wpe" if model.position_embedding_type == "learned_absolute" else "")
    return {name: shape for group in tensor_groups(model, names, 250) for name, shape in group.our_shapes.items()}


@pytest.mark.parametrize(("before", "change"), CHANGES)
def test_what_changes_no_parameter_is_allowed_and_said(before, change) -> None:
    saved = small_config(model=before)
    config = small_config(model=before | change)
    problems, notes = compare_with_saved(config, yaml.safe_dump(saved.model_dump()), weights_only=True)
    if tensors(config.model) != tensors(saved.model):
        assert {problem.key for problem in problems} <= {f"model.{key}" for key in change}
        assert problems
    else:
        assert problems == []
        assert {note.split(" is ")[0] for note in notes} == {f"model.{key}" for key in change}
    whole, _ = compare_with_saved(config, yaml.safe_dump(saved.model_dump()))
    assert whole, "a run that resumes goes on with the same model"


def test_sinks_are_parameters_too() -> None:
    model = small_config().model
    assert shape_of_weights(model) != shape_of_weights(model.model_copy(update={"softmax_type": "learnable"}))
    assert shape_of_weights(model) == shape_of_weights(model.model_copy(update={"softmax_type": "off-by-one"}))
