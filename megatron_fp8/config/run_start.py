"""Owns what a run can start from, as plain data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from megatron_fp8.config.load import LoadedConfig
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import TrainingConfig

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
