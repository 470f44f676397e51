"""Starts the training program as a person does, in processes of its own, and waits for their end."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = ROOT / "pretrain.py"
# What a launcher leaves behind, should the tests themselves run under one.
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "LOCAL_", "ROLE_", "MASTER_", "SLURM_", "OMPI_", "PMI", "MV2_")


@dataclass(frozen=True)
class Ended:
    """A program that ended: exit code, what it wrote, when (seconds since the epoch), CPU seconds with children's."""

    code: int
    stdout: str
    stderr: str
    ended_at: float
    cpu_seconds: float

    @property
    def output(self) -> str:
        """All it wrote, for the message of a failing test."""
        return f"exit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a person's shell with the package importable, one thread per rank, no colours.

    `more` is added; its `PYTHONPATH` comes before the package's.
    """
    more = dict(more or {})
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in ("RANK", "WORLD_SIZE", "FORCE_COLOR")
    }
    python_path = [more.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(part for part in python_path if part)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def run(
    command: Sequence[str | Path],
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 150,
) -> Ended:
    """Run `command` in `cwd` with its output in pipes; `environment` is added to the clean one.

    Past `timeout_seconds` the program and all its children are killed, and the test fails with what they wrote.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environment(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        # The launcher's ranks have sessions of their own, and hold the pipes.
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(f"not ended after {timeout_seconds} s\n{stdout}\n{stderr}") from None
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ended(process.returncode, stdout, stderr, time.time(), cpu_seconds)


def pretrain(*arguments: str | Path, cwd: Path, environment: Mapping[str, str] | None = None) -> Ended:
    """`python pretrain.py ARGUMENTS`: one rank, without a launcher."""
    return run([sys.executable, PRETRAIN, *arguments], cwd, environment)


def torchrun(num_ranks: int, *arguments: str | Path, cwd: Path, script: Path = PRETRAIN) -> Ended:
    """`torchrun --standalone --nproc-per-node NUM_RANKS pretrain.py ARGUMENTS`, or another `script`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return run([*launcher, script, *arguments], cwd)
