"""What a run can start from, how long it is, and its run directory, which is never overwritten. Imports no torch."""

from __future__ import annotations

import fcntl
import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from megatron_fp8.config.limits import Place
from megatron_fp8.config.load import LoadedConfig
from megatron_fp8.config.paths import open_file, why_refused, why_unwritable
from megatron_fp8.config.problem import ConfigError, Problem
from megatron_fp8.config.schema import Config, TrainingConfig

# `latest`: the latest one or an end with a message; `auto`: the newest whole one, or a fresh start where there is none.
Resume = Literal["latest", "auto"]


@dataclass(frozen=True)
class Position:
    """How far a run has come: optimizer steps, and the samples that they consumed.

    `skipped_samples`: those of them that no step counts, since the run went back to a checkpoint behind them.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_samples: int = 0

    @property
    def trained_samples(self) -> int:
        """The samples that the run's length counts."""
        return self.consumed_samples - self.skipped_samples


START = Position()


@dataclass(frozen=True)
class Start:
    """What a run starts from.

    `run_directory`: of the run that is resumed; None: a new one. `checkpoint`: the directory of an intact checkpoint;
    None: initial weights. `saved_config`, `saved_world_size`: its config, as YAML, and its number of ranks.
    `weights_only`: only its weights are loaded. `position`: where in its steps and samples the run continues.
    `may_fall_back`: use an older checkpoint if this one turns out to be corrupt. `newest`: iteration of the newest
    checkpoint, intact or not, that the run had when the choice was made. `notes`: what to tell the user.
    """

    run_directory: Path | None = None
    checkpoint: Path | None = None
    saved_config: str | None = None
    saved_world_size: int | None = None
    weights_only: bool = False
    position: Position = START
    may_fall_back: bool = False
    newest: int | None = None
    notes: tuple[str, ...] = ()

    def is_finished(self, train_iters: int) -> bool:
        """Whether it continues a run that has made all of its steps."""
        return self.run_directory is not None and self.checkpoint is not None and self.position.iteration >= train_iters

    def finished(self, train_iters: int) -> str:
        """What to say of such a run."""
        return (
            f"the run {self.run_directory} is finished: its checkpoint is at iteration {self.position.iteration} and "
            f"training.train_iters={train_iters}; nothing left to train"
        )


class Holds(Protocol):
    """What a choice keeps others from changing until it has been acted on."""

    def run(self, directory: Path) -> None:
        """Let no other job write into a run's directory. Raises BadInputError where one does and goes on doing so."""

    def checkpoint(self, path: Path) -> bool:
        """Let no job remove a checkpoint; False: it is gone already."""


TRAIN_ITERS = "training.train_iters"
# What is wrong with their values may depend on where a run goes on.
LENGTH_KEYS = (TRAIN_ITERS, "training.train_samples", "training.train_epochs")


def samples_needed(training: TrainingConfig, position: Position) -> int:
    """How many samples of its order a run takes from the start to its end, when it goes on at `position`.

    Steps before it may have been of another size.
    """
    return position.consumed_samples + (training.train_iters - position.iteration) * training.global_batch_size


def resolve_length(
    loaded: LoadedConfig, epoch_samples: int | None, position: Position = START
) -> tuple[LoadedConfig, list[Problem]]:
    """The config with `train_iters` from `train_samples` or `train_epochs`, and what contradicts it.

    `epoch_samples`: the samples of `train_epochs` epochs; None: not known (the files have mistakes of their own).
    `position`: where the run goes on; the steps before it may have been of another size. Both keys may be set where
    they say the same, as they do in the config that a run leaves in its directory. A length that cannot be derived
    leaves `train_iters` as it is.
    """
    training = loaded.config.training
    batch = training.global_batch_size
    samples = epoch_samples if training.train_samples is None else training.train_samples
    if training.train_samples is not None:
        key = "training.train_samples"
    elif training.train_epochs is not None:
        key = "training.train_epochs"
    else:
        return loaded, []
    if samples is None:
        return loaded, []
    left = max(samples - position.trained_samples, 0)
    if training.train_samples is not None and left % batch:
        # Steps are whole: a rule says so.
        return loaded, []
    iterations = position.iteration + left // batch
    value = loaded.config.training.train_samples or loaded.config.training.train_epochs
    if iterations == 0:
        reason = f"that is {samples} samples, fewer than a step of training.global_batch_size={batch}"
        return loaded, [Problem(key, value, reason, "a longer run, more text, or a smaller batch")]
    if training.train_iters not in (0, iterations):
        reason = f"{key}={value} already sets the length of the run to {iterations} steps"
        return loaded, [Problem(TRAIN_ITERS, training.train_iters, reason, f"{TRAIN_ITERS}=0, or {key}=null")]
    config = loaded.config.model_copy(update={"training": training.model_copy(update={"train_iters": iterations})})
    origins = loaded.origins
    if training.train_iters == 0:
        origins = {**origins, TRAIN_ITERS: f"from {key}={value}"}
    return replace(loaded, config=config, origins=origins), []


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
