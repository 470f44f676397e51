"""Owns the clock of the training loop: what the steps since the last record took, pauses left out. Imports no torch."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

EVALUATE, SAVE_CHECKPOINT, SAVE_PROFILE = "evaluate", "save-checkpoint", "save-profile"


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
