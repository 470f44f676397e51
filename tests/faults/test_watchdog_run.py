"""Whole jobs under torchrun in which one rank hangs: they end, and the launcher's root cause is the rank that hung."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_fp8.report.record import METRICS, read_records
from tests.e2e.conftest import Tiny
from tests.e2e.launch import run

# Patches rank 1, before the loader reads a step's samples in its thread.
HANGS = """\
import os
import signal
import threading

import pretrain
import megatron_fp8.cpu as cpu

cpu.install()
from megatron_fp8.data.loader import BatchLoader

read_step = BatchLoader._read_step


def waits_for_a_lock_that_nobody_gives_back():
    threading.Event().wait()


def stops():
    os.kill(os.getpid(), signal.SIGSTOP)


def read_or_hang(self, step_start):
    if os.environ["RANK"] == "1" and step_start >= 12:
        {way}()
    return read_step(self, step_start)


BatchLoader._read_step = read_or_hang
if __name__ == "__main__":
    pretrain.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["waits_for_a_lock_that_nobody_gives_back", "stops"])
def test_the_launcher_names_the_rank_that_hung(way: str, tiny: Tiny, tmp_path: Path) -> None:
    tiny.write_config(tmp_path, mode="bf16")
    script = tmp_path / "hangs.py"
    script.write_text(HANGS.format(way=way), encoding="utf-8")
    options = ["training.eval_iters=0", "checkpoint.save=false", "faults.hang_timeout_minutes=0.1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # A stopped process has half a minute from its launcher, beside the limit and both looks.
    ended = run([*launcher, script, "tiny.yaml", *options], tmp_path, timeout_seconds=400)
    assert ended.code == 1, ended.output
    cause = ended.stderr[ended.stderr.rindex("Root Cause") :]
    assert "HangError: hang detected: rank 1" in cause, ended.output
    if way == "stops":
        # It cannot speak, so another one does.
        assert "rank      : 0" in cause
        assert "no stack: its process does not respond" in cause
    else:
        assert "rank      : 1" in cause
        assert f"in {way}" in cause
        assert "iteration 4, phase data" in cause
    records = list(read_records(tmp_path / "runs" / "tiny" / METRICS))
    (hang,) = (record for record in records if record["event"] == "hang")
    assert hang["ranks"] == [1]
    assert records[-1]["event"] == "failure"
    assert (tmp_path / "runs" / "tiny" / "report.html").is_file()
