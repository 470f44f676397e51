"""Every form of model trains alike in every layout, with recomputation and packed documents, and in FP8."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.schema import Config
from tests.ranks import run_on_ranks
from tests.small_run import VOCAB_SIZE, run_small, small_config

FORMS: dict[str, dict[str, Any]] = {
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": "per_head", "kv_channels": 16},
    "olmo": {"normalization": "LayerNorm", "norm_affine": False},
    "olmo2": {"qk_layernorm": "all_heads", "norm_placement": "post"},
    "gemma2": {
        "norm_placement": "pre_and_post",
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "window_size": [6, 0],
        "window_attn_skip_freq": [2],
        "layernorm_zero_centered_gamma": True,
        "activation": "geglu",
        "embedding_multiplier": 8.0,
        "softmax_scale": 0.5,
        "untie_embeddings_and_output_weights": False,
    },
    "gemma3": {
        "norm_placement": "pre_and_post",
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": "per_head",
        "window_size": [6, 0],
        "window_attn_skip_freq": [1, 0, 1, 1],
        "rotary_base_local": 100.0,
        "rope_scaling_type": "linear",
        "rope_scaling_factor": 8.0,
    },
    "neox": {
        "parallel_attention_mlp": "separate_norms",
        "normalization": "LayerNorm",
        "activation": "exact_gelu",
        "add_bias_linear": True,
        "rotary_percent": 0.5,
    },
    "phi": {
        "parallel_attention_mlp": "shared_norm",
        "normalization": "LayerNorm",
        "activation": "gelu",
        "add_bias_linear": True,
        "add_output_bias": True,
        "rotary_percent": 0.5,
        "qk_layernorm": "per_head_after_rope",
    },
    "falcon": {"parallel_attention_mlp": "shared_norm", "activation": "exact_geglu", "add_mlp_bias": True},
    "gpt-oss": {"softmax_type": "learnable", "window_size": [6, 0], "add_bias_linear": True},
    "granite": {"residual_multiplier": 0.25, "logits_scaling": 4.0, "embedding_multiplier": 12.0},
    "glm": {"rotary_interleaved": True, "rotary_percent": 0.5, "add_qkv_bias": True, "norm_placement": "pre_and_post"},
    "smollm3": {"no_rope_freq": [4], "rope_scaling_type": "yarn", "rope_scaling_factor": 4.0,
                "original_max_position_embeddings": 16},
    "phi4-mini": {
        "rotary_percent": 0.5,
        "rope_scaling_type": "longrope",
        "original_max_position_embeddings": 16,
        "max_position_embeddings": 64,
        "rope_short_factor": [1.0, 1.5],
        "rope_long_factor": [2.0, 4.0],
    },
    "nemotron": {
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": True,
        "activation": "srelu",
    },
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "TP2": (2, {"parallel": {"tensor_model_parallel_size": 2}}),
    "TP2 SP": (2, {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}),
    "PP2 VPP2": (2, {"parallel": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}}),
    "DP2": (2, {}),
    "recomputed": (1, {"model": {"recompute_granularity": "full"}}),
    "packed": (1, {"data": {"reset_attention_mask": True}}),
}
# Sums in another order, relative to the value, over two steps.
TOLERANCE = 1e-4


def train(configs: list[Config]) -> list[tuple[list[float | None], int]]:
    """Losses and gradient norms of each config's steps, and this rank's number of parameters."""
    found = []
    for config in configs:
        record = run_small(config, 2, num_parameters)
        found.append(([x for step in record.steps for x in (step.loss, step.grad_norm)], record.probe))
    return found


def num_parameters(parts: Any) -> int:
    return sum(parameter.numel() for chunk in parts.chunks for parameter in chunk.parameters())


def forms(**sections: dict[str, Any]) -> list[Config]:
    model = sections.pop("model", {})
    return [small_config(model=form | model, **sections) for form in FORMS.values()]


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[float | None], int]]:
    (found,) = run_on_ranks(1, train, forms())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_form_trains_alike_in_every_layout(alone, layout: str) -> None:
    world_size, sections = LAYOUTS[layout]
    found = run_on_ranks(world_size, train, forms(**sections))[0]
    for name, (values, _), (expected, _) in zip(FORMS, found, alone, strict=True):
        assert values == pytest.approx(expected, rel=TOLERANCE), name


def test_every_form_has_the_parameters_that_its_config_promises(alone) -> None:
    for config, (_, count) in zip(forms(), alone, strict=True):
        assert count == derive_layout(config, 1, VOCAB_SIZE).num_parameters


def test_every_form_is_a_model_of_its_own(alone) -> None:
    losses = [values[0] for values, _ in alone]
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_every_form_trains_in_fp8(alone, recipe: str) -> None:
    sections = {"precision": {"mode": "fp8", "fp8_recipe": recipe, "fp8_param_gather": recipe == "delayed"}}
    found = run_on_ranks(
        2, train, forms(parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True}, **sections)
    )[0]
    for name, (values, _), (expected, _) in zip(FORMS, found, alone, strict=True):
        # FP8's rounding changes the loss of a step in the third digit.
        assert values[::2] == pytest.approx(expected[::2], rel=1e-2), name
