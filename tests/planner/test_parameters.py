"""Parameter counts against the real model over layouts, and against the published sizes of models."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.pipeline import rank_parameters, stage_chunks
from megatron_fp8.planner.plan import model_parameters
from tests.planner.published import GPT2_SMALL, GPT3_175B, LLAMA2_7B, LLAMA3_8B, LLAMA3_70B, config_of
from tests.ranks import run_on_ranks
from tests.small_run import VOCAB_SIZE, run_small, small_config

GPT = {
    "num_query_groups": None,
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 48,
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
}
UNUSUAL = {"kv_channels": 16, "activation": "geglu", "add_bias_linear": True, "fuse_qkv_params": False}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
FIRST_LAST = {"mode": "fp8", "first_last_layers_bf16": True}


def count(parts: Any) -> dict[str, int]:
    """Parameters of this rank: all, those that tensor parallelism leaves whole, weights of layers in FP8."""
    manager = parts.chunks[0].module._precision
    found = {"total": 0, "whole": 0, "fp8": 0}
    for chunk in parts.chunks:
        for name, parameter in chunk.module.named_parameters():
            found["total"] += parameter.numel()
            divided = getattr(parameter, "tensor_model_parallel", False) or "output_layer" in name
            found["whole"] += 0 if divided else parameter.numel()
            layer = int(name.split(".")[1]) + chunk.module.spec.first_layer if name.startswith("layers.") else -1
            if layer >= 0 and parameter.ndim == 2 and manager.runs_in_fp8(layer):
                found["fp8"] += parameter.numel()
    return found


def observe(config: Config) -> tuple[int, dict[str, int]]:
    record = run_small(config, 0, count)
    return record.coordinates["pp"], record.probe


@pytest.mark.parametrize(
    ("world_size", "model", "parallel", "precision"),
    [
        (1, {}, {}, {}),
        (1, GPT, {}, {}),
        (1, UNUSUAL, {}, {}),
        (2, GPT, TP2, {}),
        (2, UNUSUAL, PP2, {}),
        (2, GPT, PP2 | VPP2, {}),
        (4, {}, TP2 | PP2, FIRST_LAST),
    ],
)
def test_counts_are_those_of_the_real_model(
    world_size: int, model: dict[str, Any], parallel: dict[str, Any], precision: dict[str, Any]
) -> None:
    config = small_config(model=model, parallel=parallel, precision={"mode": "bf16"} | precision)
    layout = derive_layout(config, world_size, VOCAB_SIZE)
    for stage, observed in run_on_ranks(world_size, observe, config):
        planned = rank_parameters(config, layout, stage_chunks(config, layout, stage))
        assert planned.total == observed["total"]
        assert planned.fp8_gemm_weights == observed["fp8"]
        if world_size > 1 and "tensor_model_parallel_size" in parallel:
            assert planned.replicated == observed["whole"]
    counts = model_parameters(config, layout)
    parts = [counts.word_embedding, counts.position_embedding, counts.final_norm, counts.head]
    assert sum(parts) + config.model.num_layers * counts.per_layer == counts.total
    if world_size == 1:
        assert counts.total == observed["total"]


@pytest.mark.parametrize(
    ("model", "published"),
    [
        # Of Hugging Face's checkpoints, in their safetensors' headers.
        (GPT2_SMALL, 124_439_808),
        (LLAMA2_7B, 6_738_415_616),
        (LLAMA3_8B, 8_030_261_248),
        (LLAMA3_70B, 70_553_706_496),
    ],
)
def test_published_sizes(model: dict[str, Any], published: int) -> None:
    config = config_of(model)
    assert model_parameters(config, derive_layout(config, 1, None)).without_padding == published


def test_gpt_3() -> None:
    """Brown et al. 2020, table 2.1: 175.0 billion; of the sizes given there it is 174.6, as others have counted."""
    config = config_of(GPT3_175B, parallel={"tensor_model_parallel_size": 8})
    counts = model_parameters(config, derive_layout(config, 8, None))
    assert counts.without_padding == pytest.approx(174.6e9, rel=1e-4)
    # 50,257 tokens padded to 51,200, as in Narayanan et al. 2021.
    assert counts.total - counts.without_padding == (51200 - 50257) * 12288
