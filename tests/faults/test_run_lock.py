"""A run's directory has one job at a time, and is free again whatever ended the job before."""

from __future__ import annotations

import errno
import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp8.config.run_start import LOCK
from megatron_fp8.errors import BadInputError
from megatron_fp8.faults import run_lock
from megatron_fp8.faults.run_lock import locked_run
from tests.e2e.launch import clean_environment

# Takes the lock, says so, and waits to be killed; a child has the file open too, as a checkpoint's writer has.
HOLDER = """\
import os, signal, sys
from pathlib import Path
from megatron_fp8.checkpoint.writer_process import die_with
from megatron_fp8.faults.run_lock import locked_run
parent = os.getpid()
with locked_run(Path(sys.argv[1])):
    if os.fork() == 0:
        die_with(parent)
        print("held", flush=True)
    signal.pause()
"""


def test_a_second_job_is_refused_by_the_first_ones_name_until_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        before = (tmp_path / LOCK).read_text(encoding="utf-8")
        in_use = rf"is in use by process {holder.pid} on "
        with pytest.raises(BadInputError, match=in_use) as refused, locked_run(tmp_path, seconds_to_wait=0.3):
            pass
        assert "another run.name, or end that job first" in str(refused.value)
        assert (tmp_path / LOCK).read_text(encoding="utf-8") == before
        holder.send_signal(signal.SIGKILL)
        # The killed one's child may live a moment longer.
        with locked_run(tmp_path, seconds_to_wait=30):
            assert f"process {holder.pid} " not in (tmp_path / LOCK).read_text(encoding="utf-8")
    # And again, in the same process.
    with locked_run(tmp_path, seconds_to_wait=0):
        pass


def test_who_waits_says_so_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_lock, "SECONDS_BETWEEN_WORDS", 0.0)
    with locked_run(tmp_path), pytest.raises(BadInputError), locked_run(tmp_path, seconds_to_wait=1.0):
        pass
    words = [line for line in capsys.readouterr().err.splitlines() if "in use by process" in line]
    assert len(words) > 1
    assert "waiting up to 1 s" in words[0]
    assert "waiting up to 0 s" in words[-1]


def test_a_disk_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked_run(tmp_path, seconds_to_wait=0):
        pass
    assert "cannot be locked against a second job: [Errno 37] No locks available" in capsys.readouterr().err
