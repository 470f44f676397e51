"""What a checkpoint has and a run does not know is named; masters of other parameters are another model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_fp8.config.schema import Config
from tests.checkpoint.training import checkpoint_config, derived_layout, save_on_this_rank
from tests.ranks import run_on_ranks
from tests.small_run import VOCAB_SIZE

UNKNOWN = ("exp_avg_cubed.layers.0.layernorm_mlp.fc1_weight", "exp_avg.layers.9.layernorm_mlp.fc1_weight")
FOREIGN = "master.layers.9.layernorm_mlp.fc1_weight"
# Besides its own, by iteration.
CASES: dict[int, tuple[str, ...]] = {1: (), 2: UNKNOWN, 3: (FOREIGN,)}


def save_with_more(config: Config, checkpoints: Path) -> None:
    """A checkpoint for each case, which holds its tensors too."""
    import torch

    from megatron_fp8.checkpoint.contents import whole_content
    from megatron_fp8.checkpoint.live import LiveState

    own, is_mine = LiveState.contents, torch.distributed.get_rank() == 0

    def add(iteration: int) -> None:
        more = [whole_content(name, torch.ones(4), is_mine) for name in CASES[iteration]]
        LiveState.contents = lambda self, tensors: [*own(self, tensors), *more]  # type: ignore[method-assign]

    assert save_on_this_rank(config, checkpoints, list(CASES), add) == ["", "", ""]


def load_each(config: Config, checkpoints: Path) -> list[Any]:
    """What is said of each case's checkpoint."""
    from megatron_fp8 import device as devices
    from megatron_fp8.checkpoint.directory import CheckpointDirectory
    from megatron_fp8.checkpoint.manifest import CheckpointError
    from megatron_fp8.report.record import Recorder
    from megatron_fp8.train.setup import build_parts
    from megatron_fp8.train.step import IntervalLoss

    parts = build_parts(config, derived_layout(config), VOCAB_SIZE, devices.prepare(), Recorder([]), checkpoints)
    said: list[Any] = []
    for iteration in CASES:
        checkpoint = CheckpointDirectory(checkpoints).path(iteration)
        try:
            said.append(parts.checkpointer.load(checkpoint, IntervalLoss(parts.device.torch_device), False)[1])
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_unknown_entries_are_named_and_masters_of_another_model_refused(tmp_path: Path) -> None:
    """Two stages, of which each knows its own parameters alone."""
    config = checkpoint_config(parallel={"pipeline_model_parallel_size": 2})
    run_on_ranks(2, save_with_more, config, tmp_path)
    for none, noted, refused in run_on_ranks(2, load_each, config, tmp_path):
        assert none == []
        (note,) = noted
        assert f"are not loaded: {', '.join(sorted(UNKNOWN))}" in note
        assert f"belongs to another model: this one has no {FOREIGN}" in refused
