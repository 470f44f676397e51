"""Owns the name of the run's directory and the rule that an existing one is never written into.

It only names the directory. Making it is for one rank, with `Path.mkdir(parents=True)` (which fails if it came
into being meanwhile), after all ranks have named it: a rank that looks later would find it taken. Imports no
torch.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

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
                f"run.name={free.name}, or run.new_name_if_exists=true to have a free name taken",
            )
        ]
    )


def candidates(root: Path, name: str) -> itertools.chain[Path]:
    """`root/name`, `root/name-2`, `root/name-3`, ... without end."""
    return itertools.chain([root / name], (root / f"{name}-{number}" for number in itertools.count(2)))


def _root_problem(root: Path) -> Problem | None:
    """Why no directory can be made in `root`, if so."""
    nearest = next(path for path in (root, *root.absolute().parents) if path.exists())
    if not nearest.is_dir():
        return Problem("run.root", str(root), f"{nearest} is not a directory", "the path of a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        return Problem("run.root", str(root), f"{nearest} cannot be written to", "a directory of your own")
    return None
