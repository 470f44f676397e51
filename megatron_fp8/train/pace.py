"""Owns the measuring of speed: seconds per step, tokens per second, time left. Imports no torch."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class IntervalTiming:
    """Speed over the steps since the last record."""

    seconds_per_step: float
    tokens_per_second: float
    seconds_left: float
    data_wait_seconds: float
    """How long the steps together waited for data, on this rank."""
    seconds: float
    """What the steps together took."""
    pause_seconds: float
    """How long training waited since the last record for evaluation and for checkpoints."""


class Pace:
    """Times the steps of a run of `num_steps` steps of `tokens_per_step` tokens over all ranks."""

    def __init__(self, num_steps: int, tokens_per_step: int) -> None:
        self._steps_left = num_steps
        self._tokens_per_step = tokens_per_step
        self._interval_started = time.perf_counter()
        self._interval_steps = 0
        self._data_wait_seconds = 0.0
        self._pause_seconds = 0.0

    def step_done(self) -> None:
        """Count a step."""
        self._steps_left -= 1
        self._interval_steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside (evaluation, checkpoints)."""
        paused_at = time.perf_counter()
        yield
        seconds = time.perf_counter() - paused_at
        self._interval_started += seconds
        self._pause_seconds += seconds

    def take_interval(self, data_wait_seconds: float) -> IntervalTiming:
        """Timing of the steps since the last call, of which there must be one at least.

        `data_wait_seconds`: how long the run has waited for data since its start.
        """
        now = time.perf_counter()
        seconds = now - self._interval_started
        per_step = seconds / self._interval_steps
        waited = data_wait_seconds - self._data_wait_seconds
        self._interval_started = now
        self._interval_steps = 0
        self._data_wait_seconds = data_wait_seconds
        paused, self._pause_seconds = self._pause_seconds, 0.0
        tokens_per_second = self._tokens_per_step / per_step
        return IntervalTiming(per_step, tokens_per_second, per_step * self._steps_left, waited, seconds, paused)
