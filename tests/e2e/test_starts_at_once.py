"""Several starts of one run at once, as a scheduler makes them that takes a job for dead: they take turns."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.config.run_start import LOCK
from megatron_fp8.faults.exit_codes import ExitCode
from tests.e2e.conftest import TRAIN_ITERS, Tiny
from tests.e2e.launch import PRETRAIN, Ended, clean_environment, torchrun
from tests.e2e.test_resume import events, one_rank, require_one_history

# Stands still in the third step until it is let go, and is killed in the fifth.
KILLED = """\
import os
import signal
import time
from pathlib import Path

import pretrain
from megatron_fp8.train.state import Pace

step_done, steps = Pace.step_done, []


def wait_and_die(self):
    step_done(self)
    steps.append(self)
    if len(steps) == 3:
        Path("stands").touch()
        while not Path("go on").exists():
            time.sleep(0.01)
    if len(steps) == 5:
        os.kill(os.getpid(), signal.SIGKILL)


Pace.step_done = wait_and_die
if __name__ == "__main__":
    pretrain.main()
"""


# Ends after all checks, before training.
FAILS = """\
import pretrain
from megatron_fp8.train import job


def fail(*_):
    raise RuntimeError("no network")


job.run_job = fail
if __name__ == "__main__":
    pretrain.main()
"""


def begin(script: Path, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """A job of one rank that has begun; its output goes into pipes."""
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=cwd,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> Ended:
    stdout, stderr = process.communicate(timeout=150)
    return Ended(process.returncode, stdout, stderr, time.time(), 0.0)


@pytest.mark.parametrize("steps_before", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_of_two_starts_at_once_one_trains_and_the_other_finds_the_run_finished(
    tiny: Tiny, tmp_path: Path, steps_before: int
) -> None:
    tiny.write_config(tmp_path, mode="fp32")
    command = ("tiny.yaml", "--resume=auto", "checkpoint.save_interval=2", "checkpoint.keep_last=1")
    directory = tmp_path / "runs" / "tiny"
    if steps_before:
        stopped = one_rank(PRETRAIN, *command, f"checkpoint.exit_interval={steps_before}", cwd=tmp_path)
        assert stopped.code == ExitCode.STOPPED, stopped.output
    both = [begin(PRETRAIN, *command, cwd=tmp_path) for _ in range(2)]
    ended = [end(process) for process in both]
    output = "\n".join(one.output for one in ended)
    assert [one.code for one in ended] == [0, 0], output
    finished = [one for one in ended if "runs/tiny is finished" in one.stdout]
    assert len(finished) == 1, output
    assert "iteration 6, and training.train_iters is 6; nothing is left to train" in finished[0].stdout
    assert "first step" not in finished[0].stdout
    require_one_history(directory)
    assert CheckpointDirectory(directory / "checkpoints").iterations() == [TRAIN_ITERS]
    assert len(events(directory, "resume")) == (1 if steps_before else 0)


def test_a_job_that_waited_for_one_that_was_killed_goes_on_from_the_newest_checkpoint(
    tiny: Tiny, tmp_path: Path
) -> None:
    """The checkpoint that was the newest when it came has been removed since."""
    tiny.write_config(tmp_path, mode="fp32")
    settings = ("checkpoint.save_interval=2", "checkpoint.keep_last=1", "checkpoint.async_save=false")
    command = ("tiny.yaml", "--resume=auto", *settings)
    script = tmp_path / "killed.py"
    script.write_text(KILLED, encoding="utf-8")
    first = begin(script, *command, cwd=tmp_path)
    while not (tmp_path / "stands").exists():
        assert first.poll() is None, end(first).output
        time.sleep(0.01)
    directory = tmp_path / "runs" / "tiny"
    checkpoints = CheckpointDirectory(directory / "checkpoints")
    assert checkpoints.iterations() == [2]
    second = begin(PRETRAIN, *command, cwd=tmp_path)
    assert second.stderr is not None
    assert any(f"in use by process {first.pid}" in line for line in second.stderr)
    (tmp_path / "go on").touch()
    assert end(first).code == -9
    ended = end(second)
    assert ended.code == 0, ended.output
    (resume,) = events(directory, "resume")
    assert resume["iteration"] == 4
    require_one_history(directory)


@pytest.mark.slow
def test_a_start_that_fails_before_its_run_begins_blocks_no_other(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write_config(tmp_path, mode="fp32")
    script = tmp_path / "fails.py"
    script.write_text(FAILS, encoding="utf-8")
    failed = one_rank(script, "tiny.yaml", "--resume=auto", cwd=tmp_path)
    assert failed.code == ExitCode.FAILED, failed.output
    directory = tmp_path / "runs" / "tiny"
    assert [path.name for path in directory.iterdir()] == [LOCK]
    ended = one_rank(PRETRAIN, "tiny.yaml", cwd=tmp_path)
    assert ended.code == 0, ended.output
    require_one_history(directory)
    assert [path.name for path in directory.parent.iterdir()] == ["tiny"]
    again = one_rank(PRETRAIN, "tiny.yaml", cwd=tmp_path)
    assert again.code == ExitCode.BAD_INPUT, again.output


@pytest.mark.slow
def test_all_ranks_have_the_length_that_follows_from_what_rank_0_chose(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write_config(tmp_path, tp=2, mode="fp32")
    # The default schedule would end with the run, and the resume's run is shorter in steps.
    length = ("training.train_samples=24", "training.train_iters=0", "training.eval_iters=0")
    length = (*length, "optimizer.lr_decay_iters=6")
    stopped = torchrun(2, "tiny.yaml", *length, "checkpoint.exit_interval=3", cwd=tmp_path)
    assert "checkpoint.exit_interval=3" in stopped.stdout, stopped.output
    command = ("tiny.yaml", *length, "training.global_batch_size=6", "--resume=auto")
    resumed = torchrun(2, *command, cwd=tmp_path)
    assert resumed.code == 0, resumed.output
    assert [step["iteration"] for step in events(tmp_path / "runs" / "tiny", "train")] == [1, 2, 3, 4, 5]
    again = torchrun(2, *command, cwd=tmp_path)
    assert again.code == 0, again.output
    assert again.stdout.count("runs/tiny is finished") == 1
