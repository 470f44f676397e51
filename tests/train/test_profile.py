"""A trace of a few steps: its files, its record, and that nothing else changes, after a resume too."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.autograd import DeviceType

from megatron_fp8.monitors.profiler import largest_costs
from tests.checkpoint.training import Trained, checkpoint_config, train_on_this_rank
from tests.ranks import run_on_ranks

PASSES = {"forward-backward", "forward-compute", "backward-compute"}
SPANS = PASSES | {"step", "batch-generator", "all-grads-sync", "optimizer"}


def config_with(**profile: Any) -> Any:
    return checkpoint_config(
        precision={"mode": "fp8"},
        parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True},
        profile=profile,
    )


def traced_and_not(directory: str) -> tuple[Trained, Trained, Trained]:
    """Without a trace; with one of steps 2 and 3 of rank 1; with one that goes on from step 3, after a resume."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    def train(number: int, profile: dict[str, Any], load: Path | None = None) -> Trained:
        FP8GlobalStateManager.reset()
        initialize_rng_tracker(force_reset=True)
        checkpoints = Path(directory) / f"checkpoints-{number}" if load is None else None
        trained = train_on_this_rank(
            config_with(**profile), checkpoints, load, profiles=Path(directory) / f"profile-{number}"
        )
        parallel_state.destroy_model_parallel()
        return trained

    plain = train(0, {})
    traced = train(1, {"start": 1, "stop": 3, "ranks": [1], "record_shapes": True, "profile_memory": True})
    resumed = train(2, {"start": 2, "stop": 5, "ranks": [0, 1]}, Path(directory) / "checkpoints-0" / "iter_0000003")
    return plain, traced, resumed


def names_in_trace(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_a_trace_has_its_steps_and_changes_no_number(tmp_path: Path) -> None:
    (plain, traced, resumed), _ = run_on_ranks(2, traced_and_not, str(tmp_path))
    assert not (tmp_path / "profile-0").exists()
    assert traced.series() == plain.series()
    assert traced.state == plain.state
    assert resumed.series(after=4) == plain.series(after=4)
    assert resumed.state == plain.state

    (record,) = [record for record in traced.records if record["event"] == "profile"]
    assert (record["iteration"], record["steps"], record["ranks"]) == (3, 2, [1])
    assert "%" in record["largest costs"].splitlines()[1]
    assert {path.name for path in (tmp_path / "profile-1").iterdir()} == {
        "steps-2-3.rank-1.pt.trace.json.gz",
        "steps-2-3.rank-1.txt",
    }
    names = names_in_trace(tmp_path / "profile-1" / "steps-2-3.rank-1.pt.trace.json.gz")
    assert set(names) >= SPANS
    assert names.count("step") == 2
    # Two micro-batches a step.
    assert names.count("forward-compute") == names.count("backward-compute") == 4
    assert "Self CPU" in (tmp_path / "profile-1" / "steps-2-3.rank-1.txt").read_text()

    (record,) = [record for record in resumed.records if record["event"] == "profile"]
    assert (record["iteration"], record["steps"]) == (5, 2)
    assert len(list((tmp_path / "profile-2").glob("steps-4-5.rank-[01].pt.trace.json.gz"))) == 2


def stopped_and_full(directory: str) -> list[dict[str, Any]]:
    """A trace that the run's end cuts short, into a place where no directory can be made."""
    Path(directory, "file").touch(exist_ok=True)
    trained = train_on_this_rank(
        checkpoint_config(profile={"start": 4, "stop": 1000}), profiles=Path(directory, "file", "profile")
    )
    return [record for record in trained.records if record["event"] == "profile"]


def test_the_end_ends_a_trace_and_one_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (records,) = run_on_ranks(1, stopped_and_full, str(tmp_path))
    assert [(record["iteration"], record["steps"]) for record in records] == [(6, 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def row(key: str, device: DeviceType, on_device: float, on_cpu: float, annotation: bool = False) -> Any:
    return SimpleNamespace(
        key=key,
        device_type=device,
        self_device_time_total=on_device,
        self_cpu_time_total=on_cpu,
        count=4,
        is_user_annotation=annotation,
    )


def test_costs_are_those_of_kernels_where_there_are_any() -> None:
    rows = [
        row("aten::mm", DeviceType.CPU, 6000, 100),
        row("step", DeviceType.CPU, 0, 300, annotation=True),
        row("step", DeviceType.CUDA, 8000, 0, annotation=True),
        row("gemm_kernel", DeviceType.CUDA, 6000, 0),
        row("cast_kernel", DeviceType.CUDA, 2000, 0),
    ]
    on_device = [line.split() for line in largest_costs(rows, num_steps=2).splitlines()[1:]]
    assert on_device == [["gemm_kernel", "3.000", "75.0%", "2"], ["cast_kernel", "1.000", "25.0%", "2"]]
    on_cpu = [line.split()[0] for line in largest_costs(rows[:2], num_steps=2).splitlines()[1:]]
    assert on_cpu == ["step", "aten::mm"]
    assert len(largest_costs([], num_steps=2).splitlines()) == 1
