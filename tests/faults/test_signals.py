"""SIGTERM and SIGUSR1 at any moment and to any process: the run saves, ends with its code, and goes on bit for bit."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from tests.e2e.conftest import Tiny
from tests.e2e.launch import PRETRAIN, clean_environment
from tests.e2e.test_resume import events
from tests.faults.elastic_runs import (
    BUILT,
    COMMIT,
    EVALUATION,
    MOST_SECONDS_OF_A_START,
    NUM_RANKS,
    OVERRIDES,
    SAVE_GOES_ON,
    STEP,
    assert_same_end,
    check_plan,
    cold_launcher,
    elastic_run,
    last_iteration,
    signalled,
)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_run_that_is_told_to_stop_again_and_again(tiny: Tiny, tmp_path: Path) -> None:
    """One rank of each start is told, at other moments; torchrun takes the stop for a failure and starts again."""
    plan = [
        # Before the loop there is nothing to save, and the signal ends the rank.
        signalled(*BUILT, "SIGTERM", rank=1),
        signalled(*STEP, "SIGUSR1", rank=1, times=2),
        signalled(*EVALUATION, "SIGTERM", rank=0),
        signalled(*SAVE_GOES_ON, "SIGUSR1", rank=1),
        signalled(*COMMIT, "SIGTERM", rank=0, times=2),
    ]
    ended = check_plan(tiny, tmp_path, plan, "training.train_iters=20")
    codes = re.findall(r"failed \(exitcode: (-?\d+)\)", ended.stderr)
    assert codes == ["-15", "75", "75", "75", "75"], ended.output


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_signal_to_the_launcher_stops_all_ranks(tiny: Tiny, tmp_path: Path) -> None:
    """As Kubernetes ends a pod, and Slurm a step: torchrun hands SIGTERM on and waits for the ranks, which save."""
    tiny.write_config(tmp_path, tp=NUM_RANKS)
    arguments = ("training.train_iters=100",)
    straight = elastic_run(tmp_path, "run.name=straight", *arguments)
    assert straight.code == 0, straight.output
    directory = tmp_path / "runs" / "tiny"
    command = [*cold_launcher(restarts=0), str(PRETRAIN), "tiny.yaml", *OVERRIDES, *arguments, "--resume=auto"]
    with (tmp_path / "output").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=clean_environment(), stdout=output, stderr=subprocess.STDOUT
        )
        ends = time.monotonic() + MOST_SECONDS_OF_A_START
        while last_iteration(directory) < 3:
            assert process.poll() is None, "the run ended before it was told to stop"
            assert time.monotonic() < ends
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        code = process.wait(MOST_SECONDS_OF_A_START)
    text = (tmp_path / "output").read_text(encoding="utf-8")
    assert code == 1, text
    (end,) = events(directory, "end")
    assert end["stopped"] == "signal SIGTERM", text
    assert CheckpointDirectory(directory / "checkpoints").latest() == end["iteration"]
    resumed = elastic_run(tmp_path, "--resume=auto", *arguments)
    assert resumed.code == 0, resumed.output
    assert_same_end(directory, tmp_path / "runs" / "straight")
