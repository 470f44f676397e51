"""What the training loop asks of a monitor: before a step, after it, and at the log interval.

A monitor watches one thing. It returns what should be recorded and never writes a record itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

from megatron_fp8.report.record import Value
from megatron_fp8.train.step_times import RankTimes

Event: TypeAlias = tuple[str, dict[str, Value]]
"""The kind of a record, and its values."""


@dataclass(frozen=True)
class Interval:
    """The steps since the last `train` record, which ends at `iteration`.

    `times`: a mean step on every rank, in their order. `rows`: every rank's `local_values`.
    """

    iteration: int
    times: Sequence[RankTimes]
    rows: Sequence[Sequence[float]]


class Monitor:
    """Watches nothing; monitors override what they need. Every rank calls every method at the same step."""

    def before_step(self, iteration: int) -> AbstractContextManager[None]:
        """Entered before the step that ends with `iteration` steps done, and left after it."""
        del iteration
        return nullcontext()

    def before_update(self, iteration: int) -> None:
        """The gradients of the step are complete, and the optimizer has changed nothing yet."""

    def after_step(self, iteration: int, updated: bool) -> Iterable[Event]:
        """The step is done; `updated`: whether the optimizer changed the weights. May raise to end the run."""
        del iteration, updated
        return ()

    def local_values(self) -> Sequence[float]:
        """What this rank contributes to the record at the log interval; as many numbers on every rank."""
        return ()

    def interval_values(self, interval: Interval) -> Mapping[str, Value]:
        """What goes into the `train` record."""
        del interval
        return {}

    def on_interval(self, interval: Interval) -> Iterable[Event]:
        """What is recorded beside the `train` record."""
        del interval
        return ()
