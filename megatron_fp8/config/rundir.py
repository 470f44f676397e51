"""Owns the name of the run's directory and the rule that an existing one is never written into.

Every rank may ask for the name before a job starts; one rank makes the directory once all have asked, since a
rank that asks later finds it taken. Imports no torch.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from pathlib import Path

from megatron_fp8.config.limits import Place
from megatron_fp8.config.paths import open_file, why_refused, why_unwritable
from megatron_fp8.config.problem import ConfigError, Problem
from megatron_fp8.config.schema import Config

# Of the job that writes into the directory (`faults/run_lock.py`).
LOCK = ".lock"


def resolve_run_directory(config: Config) -> Path:
    """`root/name`, or with `run.new_name_if_exists` the first of `name-2`, `name-3`, ... that does not exist.

    Where a start failed before its run began there is nothing but a lock that nobody holds: that counts as nothing.
    Raises ConfigError when the directory exists, or cannot be made where `run.root` points to.
    """
    root = Path(config.run.root)
    problem = _root_problem(root)
    if problem is not None:
        raise ConfigError.from_problems([problem])
    for directory in candidates(root, config.run.name):
        if _is_free(directory):
            return directory
        if not config.run.new_name_if_exists:
            break
    free = next(path for path in candidates(root, config.run.name) if _is_free(path))
    raise ConfigError.from_problems(
        [
            Problem(
                "run.name",
                config.run.name,
                f"the run directory {directory} already exists and is never overwritten",
                f"--resume to resume it, run.name={free.name}, or run.new_name_if_exists=true to pick a free name",
            )
        ]
    )


def reopen_run_directory(directory: Path) -> Path:
    """The directory of a run that is continued. ConfigError where it cannot be written to."""
    if wrong := why_unwritable(directory):
        reason = f"its run {directory.name} cannot be resumed: {wrong}"
        raise ConfigError.from_problems(
            [Problem("run.root", str(directory.parent), reason, "a copy that you can write to")]
        )
    return directory


def create_run_directory(config: Config) -> Path:
    """Make the directory that `resolve_run_directory` names, and no other: of two jobs at once only one gets it.

    Of two that find what a failed start left, the lock lets one begin.
    Raises ConfigError as that function does, and where the directory cannot be made.
    """
    while True:
        directory = resolve_run_directory(config)
        if _make(directory, config) or _is_left_over(directory):
            return directory
        # Another job was faster: ask for the name again.


def make_run_directory_for_all(config: Config) -> None:
    """Make `root/name` for a run that is begun or continued, whichever of several jobs makes it: they take turns.

    Raises ConfigError where it cannot be made.
    """
    _make(Path(config.run.root) / config.run.name, config)


def _make(directory: Path, config: Config) -> bool:
    """Make a run's directory; False: it exists."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        reason = f"cannot create {directory}: {why_refused(directory, error)}"
        problem = Problem("run.root", config.run.root, reason, "a directory that you can write to")
        raise ConfigError.from_problems([problem]) from error
    return True


def _is_free(directory: Path) -> bool:
    return not os.path.lexists(directory) or _is_left_over(directory)


def _is_left_over(directory: Path) -> bool:
    """Whether a start left the directory before its run began: its lock alone is there, and no process holds it."""
    try:
        if directory.is_symlink() or [path.name for path in directory.iterdir()] != [LOCK]:
            return False
        with open_file(directory / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or who holds it cannot be known
        return False
    return True


def candidates(root: Path, name: str) -> itertools.chain[Path]:
    """`root/name`, `root/name-2`, `root/name-3`, ... without end."""
    return itertools.chain([root / name], (root / f"{name}-{number}" for number in itertools.count(2)))


def _root_problem(root: Path) -> Problem | None:
    """Why no directory can be made in `root`, if so."""
    reason = why_unwritable(root)
    return None if reason is None else Problem("run.root", str(root), reason, Place.RUNS.value)
