"""Norms by group of parameters: those of one process in FP64, whatever the layout, and together the global norm."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache
from typing import Any

import pytest

from megatron_fp8.monitors.norms import Group
from megatron_fp8.report.series_registry import layer_maps
from tests.checkpoint.training import checkpoint_config, train_on_this_rank
from tests.ranks import run_on_ranks

# The end of a name -> its kind; written down anew, without the product's table.
KIND_OF = {
    "word_embeddings.weight": "embedding",
    "position_embeddings.weight": "embedding",
    "layer_norm_weight": "norms",
    "layer_norm_bias": "norms",
    "final_norm.weight": "norms",
    "final_norm.bias": "norms",
    "layernorm_qkv.weight": "qkv",
    "layernorm_qkv.bias": "qkv",
    "proj.weight": "proj",
    "proj.bias": "proj",
    "fc1_weight": "fc1",
    "fc1_bias": "fc1",
    "fc2_weight": "fc2",
    "fc2_bias": "fc2",
    "output_layer.weight": "head",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_layers": 4},
    "gpt": {
        "num_layers": 4,
        "untie_embeddings_and_output_weights": False,
        "normalization": "LayerNorm",
        "activation": "gelu",
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
    },
}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "tp4": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
        "dp4": {},
        "tp2-dp2-overlap": {**TP2, "overlap_grad_reduce": True, "overlap_param_gather": True},
    },
    "gpt": {
        "tp2-vpp2": {**TP2, **PP2, "virtual_pipeline_model_parallel_size": 2},
        "pp2-dp2-whole": {**PP2, "use_distributed_optimizer": False},
    },
}


def config_of(model: str, parallel: dict[str, Any], **sections: dict[str, Any]) -> Any:
    return checkpoint_config(
        model=MODELS[model],
        parallel=parallel,
        training={"micro_batch_size": 1, "train_iters": 2, "eval_iters": 0},
        # Clipping changes every step's gradients; norms are of what was before.
        optimizer={"clip_grad": 0.05, "lr_warmup_iters": 1},
        logging={"log_interval": 1},
        **sections,
    )


def events(config: Any) -> tuple[list[dict], list[dict]]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    initialize_rng_tracker(force_reset=True)
    records = train_on_this_rank(config).records
    parallel_state.destroy_model_parallel()
    return [[each for each in records if each["event"] == event] for event in ("norms", "train")]


def in_fp64(config: Any) -> list[dict[str, float]]:
    """Norms of each step on one rank without a distributed optimizer, from its parameters' gradients and masters."""
    steps: list[dict[str, float]] = []

    def watch(parts: Any) -> None:
        step = parts.optimizer.step
        named = [(name, p) for chunk in parts.chunks for name, p in chunk.module.named_parameters()]

        def squares(series: str, values: Any) -> dict[str, float]:
            sums: dict[str, float] = defaultdict(float)
            for name, tensor in values:
                kind = next(kind for ending, kind in KIND_OF.items() if name.endswith(ending))
                square = tensor.detach().double().square().sum().item()
                sums[f"{series}/{kind}"] += square
                if name.startswith("layers."):
                    sums[f"{series}/layers.{name.split('.')[1]}/{kind}"] += square
                sums[series] += square
            return {name: math.sqrt(square) for name, square in sums.items()}

        def watched_step() -> Any:
            gradients = squares("grad-norm", ((name, p.main_grad) for name, p in named))
            result = step()
            # In FP32 the parameter is the master.
            steps.append({**gradients, **squares("params-norm", named)})
            return result

        parts.optimizer.step = watched_step

    train_on_this_rank(config, before=watch)
    return steps


@cache
def reference(model: str) -> list[dict[str, float]]:
    return run_on_ranks(1, in_fp64, config_of(model, {"use_distributed_optimizer": False}))[0]


def on_four_ranks(model: str) -> dict[str, tuple[list[dict], list[dict]]]:
    return {name: events(config_of(model, parallel)) for name, parallel in LAYOUTS[model].items()}


@pytest.mark.parametrize("model", MODELS)
def test_norms_are_those_of_one_process_in_fp64(model: str) -> None:
    expected = reference(model)
    assert len(expected) == 2
    for layout, (norms, trains) in run_on_ranks(4, on_four_ranks, model)[0].items():
        for record, train, step in zip(norms, trains, expected, strict=True):
            series = {name: value for name, value in record.items() if name not in ("event", "iteration", "time")}
            # The global norm has its own place.
            series["grad-norm"] = train["grad-norm"]
            assert series == pytest.approx(step, rel=1e-4), layout
            for name in ("grad-norm", "params-norm"):
                by_kind = [value for key, value in record.items() if key.startswith(f"{name}/") and key.count("/") == 1]
                whole = train["grad-norm"] if name == "grad-norm" else record["params-norm"]
                assert math.hypot(*by_kind) == pytest.approx(whole, rel=1e-6), layout
            assert ("grad-norm/head" in record) == (model == "llama")


def in_formats() -> list[tuple[list[dict], list[dict]]]:
    parallel = {"tensor_model_parallel_size": 2}
    formats = [
        {"mode": "bf16"},
        {"mode": "fp8", "fp8_param_gather": True},
        {"mode": "bf16", "main_params_dtype": "fp16", "exp_avg_dtype": "fp8"},
        # The first steps overflow.
        {"mode": "fp16", "initial_loss_scale": 2.0**24, "hysteresis": 1},
    ]
    return [events(config_of("llama", parallel, precision=precision)) for precision in formats]


def test_norms_in_every_number_format() -> None:
    expected = reference("llama")[0]
    *others, (fp16_norms, fp16_trains) = run_on_ranks(2, in_formats)[0]
    for norms, trains in others:
        assert [record["iteration"] for record in norms] == [1, 2]
        first = {name: value for name, value in norms[0].items() if name in expected}
        assert first == pytest.approx({name: expected[name] for name in first}, rel=0.1)
        for record, train in zip(norms, trains, strict=True):
            by_kind = [value for key, value in record.items() if key.startswith("grad-norm/") and key.count("/") == 1]
            assert math.hypot(*by_kind) == pytest.approx(train["grad-norm"], rel=1e-5)
    skipped = [train["iteration"] for train in fp16_trains if train["grad-norm"] is None]
    assert skipped
    assert [record["iteration"] for record in fp16_norms] == [i for i in (1, 2) if i not in skipped]


def at_intervals() -> list[list[int]]:
    found = []
    for interval in (None, 0, 1):
        config = config_of("llama", {}).model_copy(deep=True)
        logging = config.logging.model_copy(update={"norms_interval": interval, "log_interval": 2})
        norms, _ = events(config.model_copy(update={"logging": logging}))
        found.append([record["iteration"] for record in norms])
    return found


def test_when_norms_are_recorded() -> None:
    assert run_on_ranks(1, at_intervals)[0] == [[2], [], [1, 2]]


def test_a_parameter_of_no_known_kind_is_refused() -> None:
    with pytest.raises(KeyError, match="router"):
        Group.of("layers.3.router.weight")


def test_layers_lie_side_by_side_in_a_map() -> None:
    values = {"grad-norm/layers.1/qkv": 2.0, "params-norm/layers.0/qkv": 3.0, "grad-norm/qkv": 9.0}
    assert layer_maps(values, 2) == {"norm map/qkv/grad-norm": [0.0, 2.0], "norm map/qkv/params-norm": [3.0, 0.0]}
