"""A whole job that goes back: its record, its views and its checkpoints afterwards, and a resume of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.config.run_start import Position, resolve_length
from tests.config.config_samples import load_small
from tests.e2e.conftest import Tiny
from tests.e2e.launch import PRETRAIN, run
from tests.report.wandb_server import KEY, wandb_server

SCRIPT = Path(__file__).with_name("faulty_pretrain.py")
OVERRIDES = [
    "faults.nonfinite=rewind",
    "training.train_iters=0",
    "training.train_samples=40",
    "checkpoint.save_interval=2",
    "checkpoint.exit_interval=9",
    "precision.fp8_health_interval=2",
    "logging.tensorboard_dir=tensorboard",
    "logging.wandb_project=tests",
]


@pytest.mark.slow
def test_a_job_goes_back_and_is_resumed_later(tiny: Tiny, tmp_path: Path) -> None:
    with wandb_server() as server:
        wandb = {"WANDB_SILENT": "true", "WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.address}
        goes_back_and_is_resumed(tiny, tmp_path, wandb)
    # The attempt that was undone, and the run that has everything.
    undone, whole = server.runs.values()
    assert (undone.display_name, whole.display_name) == ("tiny", "tiny rollback 1")
    # The client ends a run in the middle of a step by a row with all newest values.
    assert [step for step, _ in undone.series("lm loss")][:5] == [1, 2, 3, 4, 5]
    trained = [record for record in read(tmp_path / "runs" / "tiny") if record["event"] == "train"]
    assert whole.series("lm loss") == [(record["iteration"], record["lm loss"]) for record in trained]
    assert len(whole.alerts) == 1
    assert server.unknown == []


def goes_back_and_is_resumed(tiny: Tiny, tmp_path: Path, wandb: dict[str, str]) -> None:
    config = tiny.write_config(tmp_path)
    environment = {"FAULTY_STEPS": "6", **wandb}
    ended = run([sys.executable, SCRIPT, config, *OVERRIDES], tmp_path, environment, timeout_seconds=400)
    assert ended.code == 75, ended.output
    assert "rolled back from iteration 6 to 4" in ended.stdout
    directory = tmp_path / "runs" / "tiny"
    records = read(directory)
    kinds = [record["event"] for record in records]
    assert (kinds.count("ready"), kinds.count("rewind"), kinds.count("start")) == (1, 1, 1)
    # Each step once, in order; the samples jump where the run went back.
    trained = [record for record in records if record["event"] == "train"]
    assert [record["iteration"] for record in trained] == list(range(1, 10))
    assert [record["consumed-samples"] for record in trained] == [4, 8, 12, 16, 28, 32, 36, 40, 44]
    assert [record["consumed-tokens"] for record in trained] == [32 * 4 * step for step in range(1, 10)]
    assert (directory / "console.log").read_text(encoding="utf-8").count("iteration  5/10") == 2
    assert "rolled back" in (directory / "report.html").read_text(encoding="utf-8")

    again = [PRETRAIN, config, *OVERRIDES, "checkpoint.exit_interval=null", "--resume"]
    resumed = run([sys.executable, *again], tmp_path, wandb, timeout_seconds=400)
    assert resumed.code == 0, resumed.output
    assert "finished 10 iterations" in resumed.stdout
    records = read(directory)
    # Later jobs do not forget it.
    assert [record["iteration"] for record in records if record["event"] == "rewind"] == [4]
    counters = CheckpointDirectory(directory / "checkpoints").manifest(10).counters
    assert (counters["consumed_samples"], counters["skipped_samples"], counters["rewinds"]) == (48, 8, 1)


def read(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("skipped", [0, 64])
def test_samples_that_were_passed_over_do_not_shorten_a_run(tmp_path: Path, skipped: int) -> None:
    loaded = load_small(tmp_path, ["training.train_iters=0", "training.train_samples=640"])
    batch = loaded.config.training.global_batch_size
    whole, _ = resolve_length(loaded, None)
    position = Position(3, 3 * batch + skipped, skipped)
    resumed, problems = resolve_length(loaded, None, position)
    assert problems == []
    assert resumed.config.training.train_iters == whole.config.training.train_iters == 640 // batch
