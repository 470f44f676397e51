"""Owns what a run can start from, as plain data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

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

    `run_directory`: of the run that is continued; None: a new one. `checkpoint`: the directory of a whole checkpoint;
    None: initial weights. `saved_config`: the config that it was made with, as YAML. `weights_only`: nothing but its
    weights is taken. `position`: where in its steps and samples the run goes on. `may_fall_back`: an older checkpoint
    will do when this one turns out to be damaged. `newest`: iteration of the newest checkpoint, whole or not, that the
    run had when the choice was made. `notes`: what a person should know.
    """

    run_directory: Path | None = None
    checkpoint: Path | None = None
    saved_config: str | None = None
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
            f"the run {self.run_directory} is finished: its checkpoint is of iteration {self.position.iteration}, and "
            f"training.train_iters is {train_iters}; nothing is left to train"
        )


class Holds(Protocol):
    """What a choice keeps others from changing until it has been acted on."""

    def run(self, directory: Path) -> None:
        """Let no other job write into a run's directory. Raises BadInputError where one does and goes on doing so."""

    def checkpoint(self, path: Path) -> bool:
        """Let no job remove a checkpoint; False: it is gone already."""
