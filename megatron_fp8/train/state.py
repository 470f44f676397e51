"""The counters of a run as plain data, and the clock of its loop. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace

from megatron_fp8.config.run_start import Position

EVALUATE, SAVE_CHECKPOINT, SAVE_PROFILE = "evaluate", "save-checkpoint", "save-profile"
# Counters that checkpoints of earlier versions do not have, and what they were then.
_ADDED_LATER = {
    "overflows_in_a_row": 0,
    "nonfinite_skips_in_a_row": 0,
    "nonfinite_skips": 0,
    "rewinds": 0,
    "skipped_samples": 0,
}


@dataclass(frozen=True)
class TrainState:
    """How far a run has come: optimizer steps, samples and tokens consumed by them, steps that changed no weights.

    A skipped step counts as an iteration, and its samples as consumed. `overflows_in_a_row`: those of
    `LossScaling`. `nonfinite_skips`: steps that were skipped because loss or gradients were not finite, of the whole
    run. `rewinds`: how often the run went back to a checkpoint. `skipped_samples`: those of the consumed samples, but
    not of the consumed tokens, that rewinding passed over; no step that counts has read them.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_iterations: int = 0
    overflows_in_a_row: int = 0
    nonfinite_skips_in_a_row: int = 0
    nonfinite_skips: int = 0
    rewinds: int = 0
    skipped_samples: int = 0

    def after_step(
        self,
        num_samples: int,
        seq_length: int,
        skipped: bool = False,
        overflows_in_a_row: int = 0,
        nonfinite: bool = False,
    ) -> TrainState:
        """The counters one optimizer step later; `nonfinite`: it was skipped for that."""
        return replace(
            self,
            iteration=self.iteration + 1,
            consumed_samples=self.consumed_samples + num_samples,
            consumed_tokens=self.consumed_tokens + num_samples * seq_length,
            skipped_iterations=self.skipped_iterations + skipped,
            overflows_in_a_row=overflows_in_a_row,
            nonfinite_skips_in_a_row=self.nonfinite_skips_in_a_row + 1 if nonfinite else 0,
            nonfinite_skips=self.nonfinite_skips + nonfinite,
        )

    def after_rollback(self, reached: TrainState) -> TrainState:
        """The counters of a checkpoint, to go on from behind the samples that were consumed when the run had `reached`
        the end of what is passed over."""
        return replace(
            self,
            consumed_samples=reached.consumed_samples,
            skipped_samples=self.skipped_samples + reached.consumed_samples - self.consumed_samples,
            rewinds=reached.rewinds + 1,
        )

    @property
    def position(self) -> Position:
        """Where in its steps and samples the run is."""
        return Position(self.iteration, self.consumed_samples, self.skipped_samples)

    def as_counters(self) -> dict[str, int]:
        """The counters by name."""
        return asdict(self)

    @classmethod
    def from_counters(cls, counters: Mapping[str, float]) -> TrainState:
        """From `as_counters`, with other names among them. Raises KeyError for a counter that is missing."""
        known = {**_ADDED_LATER, **counters}
        return cls(**{field.name: int(known[field.name]) for field in fields(cls)})


@dataclass(frozen=True)
class IntervalTiming:
    """The steps since the last record, on this rank.

    `seconds`: what the `num_steps` steps together took. `pauses`: seconds that training waited for other work, by what.
    """

    num_steps: int
    num_steps_left: int
    seconds: float
    pauses: Mapping[str, float]


class Pace:
    """Times the steps of a run of `num_steps` steps."""

    def __init__(self, num_steps: int) -> None:
        self._steps_left = num_steps
        self._interval_started = time.perf_counter()
        self._interval_steps = 0
        self._pauses: dict[str, float] = {}

    def step_done(self) -> None:
        """Count a step."""
        self._steps_left -= 1
        self._interval_steps += 1

    @contextmanager
    def paused(self, by: str) -> Iterator[None]:
        """Leave out what happens inside, and count it as a pause."""
        paused_at = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - paused_at
            self._interval_started += seconds
            self._pauses[by] = self._pauses.get(by, 0.0) + seconds

    def take_interval(self) -> IntervalTiming:
        """Timing of the steps since the last call, of which there must be one at least."""
        now = time.perf_counter()
        timing = IntervalTiming(self._interval_steps, self._steps_left, now - self._interval_started, self._pauses)
        self._interval_started, self._interval_steps, self._pauses = now, 0, {}
        return timing
