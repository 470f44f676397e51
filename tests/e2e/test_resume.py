"""Runs that are told to stop, save, and go on under the same name, as a scheduler or a person has them do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.checkpoint.manifest import find_corruption
from megatron_fp8.faults.exit_codes import ExitCode
from tests.checkpoint.training import NOT_COMPARED
from tests.e2e.conftest import TRAIN_ITERS, Tiny
from tests.e2e.launch import PRETRAIN, Ended, run, torchrun

# Signals its own process in the third step; leaves the exit code in a file, and ends when all ranks have done so.
SIGNALLED = """\
import os
import signal
import sys
import time

import pretrain
from megatron_fp8.train.state import Pace

step_done = Pace.step_done
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def signal_in_the_third(self):
    step_done(self)
    self.steps_seen = getattr(self, "steps_seen", 0) + 1
    if rank == world_size - 1 and self.steps_seen == 3:
        os.kill(os.getpid(), signal.{signal})


Pace.step_done = signal_in_the_third
if __name__ == "__main__":
    code = 0
    try:
        pretrain.main()
    except SystemExit as ended:
        code = ended.code
    with open(f"code{{rank}}", "w") as file:
        file.write(repr(int(code)))
    deadline = time.monotonic() + 60
    while not all(os.path.exists(f"code{{other}}") for other in range(world_size)) and time.monotonic() < deadline:
        time.sleep(0.01)
    sys.exit(code)
"""
OVERRIDES = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")


def series(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [
        {name: value for name, value in record.items() if name not in NOT_COMPARED}
        for record in records
        if record["event"] in ("train", "validation", "fp8", "fp8-check")
    ]


def events(directory: Path, event: str) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def write_signalled(directory: Path, signal: str) -> Path:
    script = directory / "signalled.py"
    script.write_text(SIGNALLED.format(signal=signal), encoding="utf-8")
    return script


def require_one_history(directory: Path) -> None:
    """Every step once, in order; nothing set aside, and the tracker at the end."""
    assert [record["iteration"] for record in events(directory, "train")] == list(range(1, TRAIN_ITERS + 1))
    checkpoints = CheckpointDirectory(directory / "checkpoints")
    assert checkpoints.latest() == TRAIN_ITERS
    assert not list(checkpoints.root.glob("*.abandoned"))
    assert len(events(directory, "end")) == 1


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_bit_by_bit(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write_config(tmp_path, tp=2)
    straight = torchrun(2, "tiny.yaml", "run.name=straight", "checkpoint.save=false", *OVERRIDES, cwd=tmp_path)
    assert straight.code == 0, straight.output
    assert not (tmp_path / "runs" / "straight" / "checkpoints").exists()

    script = write_signalled(tmp_path, "SIGUSR1")
    stopped = torchrun(2, "tiny.yaml", *OVERRIDES, cwd=tmp_path, script=script)
    assert [(tmp_path / f"code{rank}").read_text() for rank in range(2)] == ["75", "75"], stopped.output
    directory = tmp_path / "runs" / "tiny"
    checkpoints = CheckpointDirectory(directory / "checkpoints")
    assert (checkpoints.iterations(), checkpoints.latest()) == ([3], 3)
    (end,) = events(directory, "end")
    assert (end["iteration"], end["stopped"]) == (3, "signal SIGUSR1")
    assert "signal SIGUSR1" in stopped.stdout

    resumed = torchrun(2, "tiny.yaml", *OVERRIDES, "--resume", cwd=tmp_path)
    assert resumed.code == 0, resumed.output
    assert series(directory) == series(tmp_path / "runs" / "straight")
    assert (checkpoints.iterations(), checkpoints.latest()) == ([3, TRAIN_ITERS], TRAIN_ITERS)
    assert list(find_corruption(checkpoints.path(TRAIN_ITERS))) == []
    (resume,) = events(directory, "resume")
    assert (resume["iteration"], resume["notes"]) == (3, [])

    again = torchrun(2, "tiny.yaml", *OVERRIDES, "--resume", cwd=tmp_path)
    assert again.code == 0, again.output
    assert again.stdout.count("runs/tiny is finished") == 1
    require_one_history(directory)


def one_rank(script: Path, *arguments: str, cwd: Path) -> Ended:

    return run([sys.executable, script, *arguments], cwd)


@pytest.mark.slow
def test_a_run_under_a_scheduler_is_started_again_and_again_in_one_way(tiny: Tiny, tmp_path: Path) -> None:
    """The same command line: at first there is nothing to resume, then a damaged checkpoint, which is passed over.

    What comes of it are the numbers of a run that was never disturbed.
    """

    tiny.write_config(tmp_path)
    straight = one_rank(PRETRAIN, "tiny.yaml", "run.name=straight", "checkpoint.save=false", *OVERRIDES, cwd=tmp_path)
    assert straight.code == 0, straight.output
    assert not (tmp_path / "runs" / "straight" / "checkpoints").exists()
    script = write_signalled(tmp_path, "SIGTERM")
    command = ("tiny.yaml", "--resume=auto", "checkpoint.save_interval=2", *OVERRIDES)
    first = one_rank(script, *command, cwd=tmp_path)
    assert first.code == 75, first.output
    assert "starting from the initial weights" in first.stderr
    directory = tmp_path / "runs" / "tiny"
    checkpoints = CheckpointDirectory(directory / "checkpoints")
    assert checkpoints.iterations() == [2, 3]
    (end,) = events(directory, "end")
    assert end["stopped"] == "signal SIGTERM"

    path = checkpoints.path(3) / "__0_0.distcp"
    flip_a_bit(path)
    # What a killed job left is swept.
    (checkpoints.root / ".iter_0000004.incomplete").mkdir()
    second = one_rank(PRETRAIN, *command, cwd=tmp_path)
    assert second.code == 0, second.output
    (resume,) = events(directory, "resume")
    assert resume["iteration"] == 2
    assert "using iteration 2 instead" in resume["notes"][0]
    assert series(directory) == series(tmp_path / "runs" / "straight")
    assert [record["iteration"] for record in events(directory, "train")] == list(range(1, TRAIN_ITERS + 1))
    # The damaged one was set aside.
    assert checkpoints.iterations() == [2, 4, TRAIN_ITERS]
    assert [path.name for path in checkpoints.root.glob("*.abandoned")] == ["iter_0000003.abandoned"]
    assert not list(checkpoints.root.glob(".iter*"))


def test_without_a_checkpoint_nothing_is_resumed(tiny: Tiny, tmp_path: Path) -> None:

    tiny.write_config(tmp_path)
    ended = one_rank(PRETRAIN, "tiny.yaml", "--resume", cwd=tmp_path)
    assert ended.code == 2, ended.output
    assert "--resume never starts from initial weights" in ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_by_the_file_and_nothing_is_changed(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write_config(tmp_path, tp=2)
    ended = torchrun(2, "tiny.yaml", "checkpoint.save_interval=2", *OVERRIDES, cwd=tmp_path)
    assert ended.code == 0, ended.output
    directory = tmp_path / "runs" / "tiny"
    path = CheckpointDirectory(directory / "checkpoints").path(TRAIN_ITERS) / "__1_0.distcp"
    flip_a_bit(path)
    before = (directory / "metrics.jsonl").read_bytes()
    refused = torchrun(2, "tiny.yaml", "--resume", *OVERRIDES, cwd=tmp_path)
    assert refused.code == 1, refused.output
    assert "exitcode  : 2 " in refused.stderr
    assert f"{path.relative_to(tmp_path)} is corrupt: its SHA-256 differs" in refused.stderr
    assert "checkpoint.ckpt_step=4, or --resume=auto" in refused.stderr
    assert "Traceback" not in refused.stdout
    assert (directory / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["SIGTERM", "SIGUSR1"])
def test_either_signal_stops_a_job_of_four(tiny: Tiny, tmp_path: Path, signal: str) -> None:
    tiny.write_config(tmp_path, tp=2)
    ended = torchrun(4, "tiny.yaml", cwd=tmp_path, script=write_signalled(tmp_path, signal))
    assert [(tmp_path / f"code{rank}").read_text() for rank in range(4)] == ["75"] * 4, ended.output
    assert CheckpointDirectory(tmp_path / "runs" / "tiny" / "checkpoints").iterations() == [3]


def test_a_run_of_so_many_samples_goes_on_with_a_larger_batch(tiny: Tiny, tmp_path: Path) -> None:
    """Three steps of 4 samples, then two of 6: the 24 samples that the config asks for."""
    tiny.write_config(tmp_path, mode="fp32")
    length = ("training.train_iters=0", "training.train_samples=24", "training.eval_iters=0")
    stopped = one_rank(PRETRAIN, "tiny.yaml", *length, "checkpoint.exit_interval=3", cwd=tmp_path)
    assert stopped.code == ExitCode.STOPPED, stopped.output
    other = (*length, "training.global_batch_size=6", "--resume")
    refused = one_rank(PRETRAIN, "tiny.yaml", *other, cwd=tmp_path)
    assert refused.code == ExitCode.BAD_INPUT, refused.output
    assert "would end at step 5, but at step 6 in the checkpoint's schedule" in " ".join(refused.stderr.split())
    resumed = one_rank(PRETRAIN, "tiny.yaml", *other, "optimizer.lr_decay_iters=6", cwd=tmp_path)
    assert resumed.code == 0, resumed.output
    assert "training.global_batch_size is 6, was 4: the samples come in the same order" in resumed.stderr
    steps = events(tmp_path / "runs" / "tiny", "train")
    consumed = [(step["iteration"], step["consumed-samples"], step["batch-size"]) for step in steps]
    assert consumed == [(1, 4, 4), (2, 8, 4), (3, 12, 4), (4, 18, 6), (5, 24, 6)]
