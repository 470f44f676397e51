"""Owns what a comparison may say about losses: paired differences beside the seed-to-seed spread. Imports no torch.

The number of a run is the mean of its last K losses. Runs of one seed share weights and samples, so a mode's number is
compared with the reference's *at the same seed*: what the seed does to both cancels. The seed-to-seed spread is the
standard deviation (n - 1) of the reference's numbers over the seeds, which differ in weights and in samples: how far
two equally good runs lie apart that nobody would call different.

What few seeds cannot say:
- With 3 seeds the true spread lies between 0.5 and 6 times the estimate (95 %, chi-square with 2 degrees of freedom).
- Three differences of one sign happen by chance in a quarter of all cases. So lowest and highest difference are given,
  and no significance.
- Rounding alone makes two runs drift apart: a difference like that between BF16 and FP32 is what to expect of any
  change of the order of sums. Only differences well above that one say something about a format.
- Short runs say nothing about what appears after thousands of steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """A mode's loss less the reference's at each seed, in nats per token; `spread`: None for a single seed."""

    mode: str
    reference: str
    by_seed: Mapping[int, float]
    spread: float | None

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.by_seed.values())

    @property
    def lowest(self) -> float:
        """The smallest of the seeds' differences; NaN if one is."""
        return math.nan if math.isnan(self.mean) else min(self.by_seed.values())

    @property
    def highest(self) -> float:
        """The largest of the seeds' differences; NaN if one is."""
        return math.nan if math.isnan(self.mean) else max(self.by_seed.values())

    @property
    def is_larger_than_spread(self) -> bool | None:
        """Whether the mean difference is; None where one of the two is unknown."""
        if self.spread is None or math.isnan(self.spread):
            return None
        return not abs(self.mean) <= self.spread

    @property
    def verdict(self) -> str:
        """A sentence."""
        start = f"{self.mode} differs from {self.reference} by {self.mean:+.4f} nats"
        if not math.isfinite(self.mean):
            return f"{self.mode} has diverged: a loss is not finite"
        if self.spread is None:
            return f"{start}; one seed has no spread"
        if math.isnan(self.spread):
            return f"{start}; {self.reference} has diverged, so there is no spread"
        if not self.is_larger_than_spread:
            return f"{start}, within the seed-to-seed spread {self.spread:.4f}"
        signs = {math.copysign(1, value) for value in self.by_seed.values()}
        always = len(signs) == 1 and min(abs(value) for value in self.by_seed.values()) > self.spread
        return (
            f"{start}, larger than the seed-to-seed spread {self.spread:.4f}"
            f"{'' if always else ' on average, not'} at every seed"
        )


def last_mean(losses: Sequence[float], num_last: int) -> float:
    """The number of a run; NaN when one of the losses is not finite."""
    mean = statistics.fmean(losses[-num_last:])
    return mean if math.isfinite(mean) else math.nan


def seed_spread(numbers: Mapping[int, float]) -> float | None:
    """Standard deviation over the seeds; None for a single one, NaN when a number is."""
    if len(numbers) < 2:
        return None
    if any(math.isnan(number) for number in numbers.values()):
        return math.nan
    return statistics.stdev(numbers.values())


def difference(
    mode: str, numbers: Mapping[int, float], reference: str, reference_numbers: Mapping[int, float]
) -> Difference:
    """Of a mode to the reference, by seed; both must have the same seeds."""
    if numbers.keys() != reference_numbers.keys():
        raise ValueError(f"{mode} has the seeds {list(numbers)}, {reference} {list(reference_numbers)}")
    by_seed = {seed: numbers[seed] - reference_numbers[seed] for seed in numbers}
    return Difference(mode, reference, by_seed, seed_spread(reference_numbers))
