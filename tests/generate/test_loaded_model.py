"""A model loaded for inference is the one that was trained: its loss is, bit for bit, that of the run that saved it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fp8.checkpoint.directory import TRACKER
from megatron_fp8.checkpoint.manifest import CheckpointError
from megatron_fp8.checkpoint.saved_model import InferenceSettings, find_checkpoint, read_saved_model
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.config.schema import Config
from megatron_fp8.errors import BadInputError
from tests.ranks import run_on_ranks
from tests.small_run import batches, small_config

GPT2 = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "num_query_groups": 8,
    "hidden_dropout": 0.1,
}
SHARED = {"tensor_model_parallel_size": 2}
# World size, and what differs from the small Llama-style model.
RUNS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "fp8 primary weights, sequence parallel": (
        2,
        {
            "precision": {"mode": "fp8", "fp8_param_gather": True, "fp8_amax_history_len": 4},
            "parallel": {**SHARED, "sequence_parallel": True},
        },
    ),
    "fp8 own scales, primary weights": (
        1,
        {"precision": {"mode": "fp8", "fp8_recipe": "tensorwise", "fp8_param_gather": True}},
    ),
    "fp8 fallen back": (1, {"precision": {"mode": "fp8", "fp8_fallback": True}}),
    "gpt-2 on two stages": (
        2,
        {"model": GPT2, "precision": {"mode": "bf16"}, "parallel": {"pipeline_model_parallel_size": 2}},
    ),
    "half masters": (1, {"precision": {"mode": "fp16", "main_params_dtype": "fp16"}}),
}


@dataclass(frozen=True)
class Losses:
    """Loss in nats per token: of the run when it saved, of the loaded model on the same layout."""

    trained: float
    loaded: float


def train_save_and_load(config: Config, directory: Path) -> Losses:
    """Two steps, a checkpoint, the loss; then the checkpoint's model and its loss."""
    import torch
    from megatron.core import parallel_state

    from megatron_fp8 import device as devices
    from megatron_fp8.config.layout import derive_layout
    from megatron_fp8.report.record import Recorder
    from megatron_fp8.train.checkpointing import Progress
    from megatron_fp8.train.setup import build_parts
    from megatron_fp8.train.state import TrainState
    from megatron_fp8.train.step import IntervalLoss

    layout = derive_layout(config, torch.distributed.get_world_size(), None)
    parts = build_parts(config, layout, layout.vocab_size, devices.prepare(), Recorder([]), directory / "checkpoints")
    for _ in range(2):
        parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
        parts.schedule.step(1)
    if config.precision.fp8_fallback:
        fallen_back = {"fallen_back": [1], "counted_layers": [], "counts": []}
        parts.health.load_state_dict(fallen_back)
    trained = parts.stepper.evaluate(batches(parts), parts.batches.shape).reduced_mean()
    progress = Progress(TrainState(2, 8, 8), IntervalLoss(parts.device.torch_device), None)
    parts.checkpointer.after_step(progress, stops=True)
    parallel_state.destroy_model_parallel()
    parallel = config.parallel
    settings = InferenceSettings(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        micro_batch_size=config.training.micro_batch_size,
        num_microbatches=layout.num_microbatches,
    )
    return Losses(trained, loss_of(directory, settings))


def loss_of(path: Path, settings: InferenceSettings) -> float:
    """The loss of the checkpoint's model on the tokens that it was trained on, in the running world."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from megatron_fp8 import device as devices
    from megatron_fp8.generate.loaded_model import load_model

    FP8GlobalStateManager.reset()
    initialize_rng_tracker(force_reset=True)
    saved = read_saved_model(path, settings, torch.distributed.get_world_size())
    model = load_model(saved, devices.prepare())
    assert not any(parameter.requires_grad for stage in model.stages for parameter in stage.parameters())
    parts = _AsParts(model.config, model.groups, model.stages, model.device)
    loss = model.stepper().evaluate(batches(parts), model.batch_shape)
    parallel_state.destroy_model_parallel()
    return loss.reduced_mean()


def refusal_of_different_iterations(path: Path) -> str:
    """What is said where each rank found another checkpoint as the latest."""
    import torch

    from megatron_fp8.generate.loaded_model import _require_one_checkpoint

    saved = read_saved_model(path, InferenceSettings(tensor_model_parallel_size=2), 2)
    _require_one_checkpoint(saved)
    other = replace(saved.manifest, iteration=1 + torch.distributed.get_rank())
    with pytest.raises(BadInputError) as refused:
        _require_one_checkpoint(replace(saved, manifest=other))
    return str(refused.value)


@dataclass(frozen=True)
class _AsParts:
    config: Config
    groups: Any
    chunks: Any
    device: Any


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_is_that_of_the_run(root, name) -> None:
    world_size, sections = RUNS[name]
    config = small_config(**{**sections, "model": {"num_layers": 2, **sections.get("model", {})}})
    losses = run_on_ranks(world_size, train_save_and_load, config, root / name)
    assert losses[0].loaded == losses[0].trained
    alone = InferenceSettings(micro_batch_size=2, num_microbatches=8)
    (loss,) = run_on_ranks(1, loss_of, root / name, alone)
    assert loss == pytest.approx(losses[0].trained, abs=2e-3 if world_size > 1 else 1e-6)


@pytest.fixture(scope="module")
def run(root) -> Path:
    """A run in FP8 that saved; its path."""
    directory = root / "run"
    config = small_config(model={"num_layers": 2}, precision={"mode": "fp8", "fp8_amax_history_len": 4})
    run_on_ranks(1, train_save_and_load, config, directory)
    return directory


def test_a_checkpoint_is_found_by_its_run_its_directory_and_itself(run, tmp_path) -> None:
    checkpoints = run / "checkpoints"
    for path in (run, checkpoints, checkpoints / TRACKER, checkpoints / "iter_0000002"):
        assert find_checkpoint(path) == checkpoints / "iter_0000002"
    with pytest.raises(BadInputError, match=r"there is no checkpoint of iteration 7 .* there are \[2\]"):
        find_checkpoint(run, 7)
    with pytest.raises(BadInputError, match="there is no checkpoint at"):
        find_checkpoint(tmp_path)


def test_formats_of_training_are_left_out_and_others_can_be_chosen(run) -> None:
    def config(**settings: Any) -> Config:
        return read_saved_model(run, InferenceSettings(**settings), 1).config

    assert config().precision.mode == "fp8"
    assert config(mode="bf16").precision.mode == "bf16"
    assert config(mode="bf16").precision.fp8_amax_history_len != config().precision.fp8_amax_history_len
    assert config(fp8_recipe="tensorwise").precision.fp8_recipe == "tensorwise"
    assert config().training.global_batch_size == config().training.micro_batch_size


def test_what_does_not_fit_is_refused_with_what_to_use_instead(run) -> None:
    with pytest.raises(ConfigError) as caught:
        read_saved_model(run, InferenceSettings(3, 4), 12)
    keys = {problem.key for problem in caught.value.problems}
    assert {"model.num_attention_heads", "model.num_layers", "model.ffn_hidden_size"} <= keys
    uses = " ".join(problem.use_instead for problem in caught.value.problems)
    assert "parallel.tensor_model_parallel_size=" in uses
    assert "model.num_layers=" not in uses
    with pytest.raises(ConfigError, match="not divisible by the ranks of one model replica"):
        read_saved_model(run, InferenceSettings(3, 1), 4)


def test_fp8_without_saved_scales_is_refused(root) -> None:
    directory = root / "gpt-2 on two stages"
    with pytest.raises(ConfigError, match=r"the checkpoint has none\n    use: precision\.fp8_recipe=tensorwise"):
        read_saved_model(directory, InferenceSettings(mode="fp8"), 1)
    saved = read_saved_model(directory, InferenceSettings(fp8_recipe="tensorwise"), 1)
    assert saved.config.precision.mode == "fp8"


def test_ranks_that_found_different_checkpoints_say_so(run) -> None:
    said = run_on_ranks(2, refusal_of_different_iterations, run)
    assert all("iterations [1, 2]" in text and "use: --iteration 1" in text for text in said)


def test_a_damaged_checkpoint_is_refused(run, tmp_path) -> None:
    import shutil

    copy = tmp_path / "iter_0000002"
    shutil.copytree(run / "checkpoints" / "iter_0000002", copy)
    largest = max(copy.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"corrupt: .*{largest.name}"):
        read_saved_model(copy, InferenceSettings(), 1)
    assert yaml.safe_load(read_saved_model(run, InferenceSettings(), 1).manifest.config)["run"]["name"] == "small"
