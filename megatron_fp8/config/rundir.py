"""Owns the name of the run's directory and the rule that an existing one is never written into.

Every rank may ask for the name before a job starts; one rank makes the directory once all have asked, since a
rank that asks later finds it taken. Imports no torch.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from megatron_fp8.config.paths import why_refused, why_unwritable
from megatron_fp8.config.place import Place
from megatron_fp8.config.problem import ConfigError, Problem
from megatron_fp8.config.schema import Config


def resolve_run_directory(config: Config) -> Path:
    """`root/name`, or with `run.new_name_if_exists` the first of `name-2`, `name-3`, ... that does not exist.

    Raises ConfigError when the directory exists, or cannot be made where `run.root` points to.
    """
    root = Path(config.run.root)
    problem = _root_problem(root)
    if problem is not None:
        raise ConfigError.from_problems([problem])
    for directory in candidates(root, config.run.name):
        if not os.path.lexists(directory):
            return directory
        if not config.run.new_name_if_exists:
            break
    free = next(path for path in candidates(root, config.run.name) if not os.path.lexists(path))
    raise ConfigError.from_problems(
        [
            Problem(
                "run.name",
                config.run.name,
                f"the run directory {directory} exists, and nothing in it is overwritten",
                f"--resume to continue that run, run.name={free.name}, or run.new_name_if_exists=true to have a free "
                "name taken",
            )
        ]
    )


def reopen_run_directory(directory: Path) -> Path:
    """The directory of a run that is continued. ConfigError where it cannot be written to."""
    if wrong := why_unwritable(directory):
        reason = f"its run {directory.name} cannot be continued: {wrong}"
        raise ConfigError.from_problems([Problem("run.root", str(directory.parent), reason, "a copy of your own")])
    return directory


def create_run_directory(config: Config) -> Path:
    """Make the directory that `resolve_run_directory` names, and no other: of two jobs at once only one gets it.

    Raises ConfigError as that function does, and where the directory cannot be made.
    """
    while True:
        directory = resolve_run_directory(config)
        if _make(directory, config):
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
        reason = f"{directory} cannot be made: {why_refused(directory, error)}"
        problem = Problem("run.root", config.run.root, reason, "a directory of your own")
        raise ConfigError.from_problems([problem]) from error
    return True


def candidates(root: Path, name: str) -> itertools.chain[Path]:
    """`root/name`, `root/name-2`, `root/name-3`, ... without end."""
    return itertools.chain([root / name], (root / f"{name}-{number}" for number in itertools.count(2)))


def _root_problem(root: Path) -> Problem | None:
    """Why no directory can be made in `root`, if so."""
    reason = why_unwritable(root)
    return None if reason is None else Problem("run.root", str(root), reason, Place.RUNS.value)
