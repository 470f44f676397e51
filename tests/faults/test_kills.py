"""Ranks that are killed at any moment, under torchrun's elastic restart: the run ends as if nothing had happened."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Tiny
from tests.e2e.launch import clean_environment
from tests.faults import killed_pretrain
from tests.faults.elastic_runs import (
    BUILT,
    COMMIT,
    EVALUATION,
    NUM_RANKS,
    SAVE_BEGINS,
    SAVE_GOES_ON,
    STEP,
    Signalled,
    check_plan,
    signalled,
)


def test_a_process_that_is_left_alone_ends() -> None:
    """Whether its parent ends later, or has ended already when it asks for that."""
    script = (
        "import os, signal, sys\n"
        "from megatron_fp8.checkpoint.writer_process import die_with\n"
        "parent = os.getpid()\n"
        "for asked in (parent, parent + 1):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        die_with(asked)\n"
        "        os.write(1, b'waits\\n')\n"
        "        signal.pause()\n"
        "    if asked != parent:\n"
        "        os.write(1, b'%d\\n' % os.waitpid(child, 0)[1])\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = sorted(process.stdout.readline().strip() for _ in range(2))
        process.kill()
        # At the end of the file nobody is left who could write into it.
        assert said == [str(int(signal.SIGKILL)), "waits"]
        assert process.stdout.read() == ""


@pytest.mark.timeout(1200)
def test_ranks_killed_while_a_checkpoint_is_written_and_committed(tiny: Tiny, tmp_path: Path) -> None:
    plan = [signalled(*SAVE_GOES_ON, rank=1, writer_sticks=True), signalled(*COMMIT)]
    check_plan(tiny, tmp_path, plan)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_ranks_killed_while_they_import_the_libraries(tiny: Tiny, tmp_path: Path) -> None:
    """Under torchrun's command line, whose ranks start from nothing."""
    plan = [
        signalled("megatron_fp8/device.py", "prepare", "return", rank=1, early=True),
        signalled("parallel/process_group.py", "store_of_this_launch", "return", rank=0, early=True),
        signalled(*SAVE_BEGINS, count=2, rank=1),
    ]
    check_plan(tiny, tmp_path, plan, cold=True)


@pytest.mark.slow
@pytest.mark.timeout(6600)
def test_twenty_kills(tiny: Tiny, tmp_path: Path) -> None:
    generator = random.Random(20)

    def anyone() -> int:
        return generator.randrange(NUM_RANKS)

    def at_random() -> Signalled:
        return signalled(*STEP, rank=anyone(), seconds=generator.uniform(0, 1))

    plan = [
        signalled("", killed_pretrain.START, "call", rank=anyone()),
        signalled("megatron_fp8/device.py", "prepare", "return", rank=anyone(), early=True),
        signalled("parallel/process_group.py", "store_of_this_launch", "return", rank=anyone(), early=True),
        signalled(*BUILT, rank=anyone()),
        signalled(*EVALUATION, rank=anyone()),
        signalled(*STEP, rank=anyone()),
        signalled(*SAVE_BEGINS, count=2, rank=anyone()),
        at_random(),
        signalled(*SAVE_GOES_ON, rank=0, writer_sticks=True),
        signalled("checkpoint/save.py", "write_and_sum", "call", rank=anyone(), in_writer=True),
        signalled("checkpoint/manifest.py", "write_sums", "return", rank=anyone(), in_writer=True),
        signalled("train/checkpointing.py", "load", "call", rank=anyone()),
        signalled("checkpoint/manifest.py", "remove_sums", "return"),
        # The third one, after the rename: the tracker.
        signalled("checkpoint/manifest.py", "write_atomically", "call", count=3),
        signalled("checkpoint/directory.py", "sweep", "return"),
        signalled("checkpoint/directory.py", "prune", "call", count=2),
        signalled("report/record.py", "drop_records_after", "return"),
        at_random(),
        signalled(*EVALUATION, rank=anyone()),
        # Nothing is left to do but to end.
        signalled("train/loop.py", "train", "return", rank=anyone()),
    ]
    assert len(plan) == 20
    check_plan(tiny, tmp_path, plan, "training.train_iters=100", "checkpoint.keep_last=3")
