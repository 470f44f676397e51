"""Owns the `faults` section of the config: what a run does when something goes wrong that it can see.

Imports no torch.
"""

from typing import Literal

from pydantic import Field

from megatron_fp8.config.base import Section
from megatron_fp8.config.limits import (
    MOST_FACTOR,
    MOST_MINUTES,
    MOST_STEPS,
    MOST_THRESHOLD,
    MOST_WINDOW,
    SHORTEST_MINUTES,
)


class FaultsConfig(Section):
    """What is done about steps that go wrong; for users: `docs/faults.md`."""

    nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    """At NaN or infinity in loss or gradients: end the run, leave the step out, or go back to a checkpoint."""
    nonfinite_max_skips_in_a_row: int = Field(default=3, ge=1, le=MOST_STEPS)
    """With nonfinite=skip: end the run when this many steps in a row were left out and the next is not finite."""
    nonfinite_max_skips: int = Field(default=100, ge=1, le=MOST_STEPS)
    """With nonfinite=skip: the same for this many steps of the whole run."""
    spike: Literal["off", "warn", "rewind"] = "warn"
    """At a spike of the training loss: nothing, a warning in the record, or go back to a checkpoint."""
    spike_window: int = Field(default=128, ge=8, le=MOST_WINDOW)
    """Steps whose losses say what is normal, by median and median absolute deviation; none is told before as many."""
    spike_threshold: float = Field(default=6.0, gt=0, le=MOST_THRESHOLD)
    """Robust standard deviations above the median that a loss may have."""
    spike_num_steps: int = Field(default=5, ge=1, le=MOST_STEPS)
    """Steps in a row with a loss above spike_threshold that make a spike."""
    spike_large_threshold: float = Field(default=30.0, gt=0, le=MOST_THRESHOLD)
    """Robust standard deviations above the median from which a single loss makes a spike."""
    max_rewinds: int = Field(default=3, ge=1, le=MOST_STEPS)
    """How often a run may go back to a checkpoint in all; then a further cause ends it."""
    hang_timeout_minutes: float | None = Field(default=None, ge=0, le=MOST_MINUTES)
    """Minutes without progress after which a job ends that a rank holds up, which is named; null: half of
    parallel.distributed_timeout_minutes; 0: none is looked for."""
    hang_timeout_slow_minutes: float | None = Field(default=60.0, ge=SHORTEST_MINUTES, le=MOST_MINUTES)
    """The same while a run loads, saves, or makes its first step; null: as long as it takes."""
    replica_check_interval: int = Field(default=1000, ge=0, le=MOST_STEPS)
    """Steps between comparisons of what several ranks hold alike, bit for bit; a difference ends the run; 0: none."""
    slow_rank_factor: float | None = Field(default=1.5, gt=1, le=MOST_FACTOR)
    """Name a rank whose own work takes so many times as long as that of the ranks which do the same; null: none."""
    slow_rank_intervals: int = Field(default=3, ge=1, le=MOST_STEPS)
    """Log intervals in a row in which a rank must be slow to be named."""
