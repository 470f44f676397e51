"""A run that was saved and goes on in new processes ends in the same bits as one that was never interrupted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.config.schema import Config
from tests.checkpoint.training import STEPS, STEPS_BEFORE, Trained, checkpoint_config, train_on_this_rank
from tests.ranks import run_on_ranks

Sections = dict[str, dict[str, Any]]
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
GPT = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
    "fuse_qkv_params": False,
}
TIED = {"untie_embeddings_and_output_weights": False}
TP2 = (2, {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}})
PP2 = (2, {"parallel": {"pipeline_model_parallel_size": 2}})
PP2_VPP2 = (
    2,
    {
        "parallel": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        "model": {"num_layers": 4},
    },
)
DP2 = (2, {})
DP2_REPLICATED = (2, {"parallel": {"use_distributed_optimizer": False}})
ONE = (1, {})
TP2_DP2 = (4, TP2[1])
TP2_PP2 = (4, {"parallel": {**TP2[1]["parallel"], **PP2[1]["parallel"]}})


def fp8(recipe: str = "delayed", **keys: Any) -> dict[str, Any]:
    history = {"fp8_amax_history_len": 4} if recipe == "delayed" else {}
    return {"mode": "fp8", "fp8_recipe": recipe, "fp8_health_interval": 2, **history, **keys}


FP16 = {"mode": "fp16", "initial_loss_scale": 2.0**14, "hysteresis": 1, "loss_scale_window": 2}
# Falls back after two checks, so that the count, then the decision, is part of the checkpoint.
FALLBACK = fp8(fp8_fallback=True, fp8_fallback_num_checks=1, fp8_fallback_max_error=1e-6, fp8_health_interval=2)
COUNTING = fp8(fp8_fallback=True, fp8_fallback_num_checks=2, fp8_fallback_max_error=1e-6, fp8_health_interval=2)
LOW_MOMENTS = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16", "main_params_dtype": "fp16"}

# Every format, layout and kind of model beside several of the others.
CASES: dict[str, tuple[tuple[int, Sections], dict[str, Any], dict[str, Any]]] = {
    "fp32-one": (ONE, {"mode": "fp32"}, DROPOUT),
    "fp32-tp2": (TP2, {"mode": "fp32"}, {**GPT, **TIED, **DROPOUT}),
    "bf16-pp2-tied": (PP2, {"mode": "bf16"}, {**TIED, **DROPOUT}),
    "bf16-dp2-replicated": (DP2_REPLICATED, {"mode": "bf16"}, {**GPT, **DROPOUT}),
    "fp16-dp2": (DP2, FP16, DROPOUT),
    "fp16-pp2": (PP2, FP16, GPT),
    "delayed-pp2vpp2": (PP2_VPP2, fp8(), {**GPT, **DROPOUT}),
    "delayed-dp2": (DP2, fp8(), DROPOUT),
    "tensorwise-dp2": (DP2, fp8("tensorwise"), DROPOUT),
    "blockwise-dp2": (DP2, fp8("blockwise"), TIED),
    "mxfp8-pp2": (PP2, fp8("mxfp8"), DROPOUT),
    "interval-tp2": (TP2, fp8(fp8_interval=2), GPT),
    "first-last-pp2vpp2": (PP2_VPP2, fp8(first_last_layers_bf16=True), {**TIED, **DROPOUT}),
    "amax-off-dp2": (DP2, fp8(amax_reduction="off"), {}),
    "fallback-dp2": (DP2, FALLBACK, DROPOUT),
    "counting-pp2": (PP2, COUNTING, {}),
    "low-moments-dp2": (DP2, {"mode": "bf16", **LOW_MOMENTS}, DROPOUT),
    "bf16-moments-tp2": (TP2, {"mode": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, GPT),
    "fp8-weights-dp2": (DP2, fp8(fp8_param_gather=True), DROPOUT),
    "tensorwise-weights-dp2": (DP2, fp8("tensorwise", fp8_param_gather=True), {}),
}
# Of every format one of the others is always run.
SLOW_CASES = {
    *("fp32-one", "bf16-pp2-tied", "fp16-dp2", "delayed-dp2", "counting-pp2"),
    *("first-last-pp2vpp2", "bf16-moments-tp2", "tensorwise-weights-dp2"),
}
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"mode": "fp32"},
    "bf16": {"mode": "bf16"},
    "fp16": FP16,
    "delayed": fp8(),
    "tensorwise": fp8("tensorwise"),
    "blockwise": fp8("blockwise"),
    "mxfp8": fp8("mxfp8"),
    "interval": fp8(fp8_interval=2),
    "first-last": fp8(first_last_layers_bf16=True),
    "fallback": FALLBACK,
    "fp8-weights": fp8(fp8_param_gather=True),
    "tensorwise-weights": fp8("tensorwise", fp8_param_gather=True),
    "blockwise-weights": fp8("blockwise", fp8_param_gather=True),
}
LAYOUTS = {
    "one": ONE,
    "tp2": TP2,
    "pp2": PP2,
    "pp2vpp2": PP2_VPP2,
    "dp2": DP2,
    "dp2-replicated": DP2_REPLICATED,
    "tp2dp2": TP2_DP2,
    "tp2pp2": TP2_PP2,
}
MODELS = {"llama": DROPOUT, "gpt": {**GPT, **DROPOUT}, "llama-tied": {**TIED, **DROPOUT}, "gpt-tied": {**GPT, **TIED}}


def make_config(layout: tuple[int, Sections], precision: dict[str, Any], model: dict[str, Any]) -> Config:
    sections = layout[1]
    parallel = sections.get("parallel", {})
    # As few layers as show the case.
    several = "pipeline_model_parallel_size" in parallel or precision.get("fp8_fallback")
    num_layers = 4 if precision.get("first_last_layers_bf16") else 2 if several else 1
    return checkpoint_config(
        parallel=parallel,
        precision=precision,
        # MXFP8's blocks of 32 do not span two ranks' parts of a sequence.
        model={"num_layers": num_layers, "seq_length": 32 if precision.get("fp8_recipe") == "mxfp8" else 16}
        | {**sections.get("model", {}), **model},
    )


def require_exact(world_size: int, config: Config, directory: Path) -> Trained:
    """Straight on, with a save in the middle; and from that save on in new processes."""
    straight = run_on_ranks(world_size, train_on_this_rank, config, directory)
    saved = directory / f"iter_{STEPS_BEFORE:07d}"
    resumed = run_on_ranks(world_size, train_on_this_rank, config, None, saved)
    for before, after in zip(straight, resumed, strict=True):
        assert after.notes == []
        assert [name for name in before.state if after.state.get(name) != before.state[name]] == []
        assert after.state.keys() == before.state.keys()
        assert before.series(after=STEPS_BEFORE)
        assert after.series() == before.series(after=STEPS_BEFORE)
        if before.samples:
            skipped = len(before.samples) // 2
            assert sorted(after.samples) == sorted(before.samples)[skipped:]
    return straight[0]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW_CASES else ()) for case in CASES]
)
def test_resuming_is_exact(case: str, tmp_path: Path) -> None:
    layout, precision, model = CASES[case]
    straight = require_exact(layout[0], make_config(layout, precision, model), tmp_path)
    if precision["mode"] == "fp16":
        # Of the steps before the save some overflowed, and later ones did not.
        skipped = {r["iteration"]: r["skipped-iterations"] for r in straight.records if r["event"] == "train"}
        assert 0 < skipped[STEPS_BEFORE - 1] < STEPS_BEFORE
        assert skipped[STEPS] < STEPS - 1


def combinations() -> Iterator[tuple[str, str, str]]:
    """Of formats, layouts and models all that go together: FP8 weights want shards and a fused QKV weight."""
    for precision, layout, model in itertools.product(FORMATS, LAYOUTS, MODELS):
        if not precision.endswith("weights") or (layout != "dp2-replicated" and model.startswith("llama")):
            yield precision, layout, model


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "layout", "model"), combinations())
def test_resuming_is_exact_in_every_combination(precision: str, layout: str, model: str, tmp_path: Path) -> None:
    config = make_config(LAYOUTS[layout], FORMATS[precision], MODELS[model])
    require_exact(LAYOUTS[layout][0], config, tmp_path)
