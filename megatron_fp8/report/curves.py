"""Holds a series of any length in little memory.

Points are thinned in buckets of 2^k iterations, aligned at 0. A wider bucket consists of whole narrower ones, so that
thinning repeatedly gives the same points as thinning once.
"""

from __future__ import annotations

import math
from enum import Enum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Keep(Enum):
    """Which points of a bucket are kept."""

    EXTREMES = "smallest and largest"
    SMALLEST = "smallest"
    LARGEST = "largest"


class Curve:
    """A series by iteration, thinned to at most about `2 * buckets` of its points.

    A bucket keeps its smallest and largest value (or one of them, see `Keep`) and one value that is not finite, if
    there is one. `mean`, `last`, `smallest` and `largest` are of all finite values; None if there are none.
    """

    def __init__(self, buckets: int = 500, keep: Keep = Keep.EXTREMES) -> None:
        self.width = 1
        self.count = 0
        self.not_finite = 0
        self.last: float | None = None
        self._buckets = buckets
        self._keep = keep
        self._sum = 0.0
        self._iterations: Floats = np.empty(0)
        self._values: Floats = np.empty(0)

    def extend(self, iterations: Floats, values: Floats) -> None:
        """Append values of later iterations."""
        finite = values[np.isfinite(values)]
        self.count += len(values)
        self.not_finite += len(values) - len(finite)
        if len(finite):
            self.last = float(finite[-1])
            self._sum += float(finite.sum())
        self._iterations = np.concatenate([self._iterations, iterations])
        self._values = np.concatenate([self._values, values])
        # Half of the values are new each time, so the cost is linear in their number.
        if len(self._values) > 4 * self._buckets:
            self._thin()

    @property
    def mean(self) -> float | None:
        """Mean of the finite values."""
        finite = self.count - self.not_finite
        return self._sum / finite if finite else None

    @property
    def smallest(self) -> float | None:
        """Smallest finite value; exact where `Keep` keeps it."""
        return min(filter(math.isfinite, self._values.tolist()), default=None)

    @property
    def largest(self) -> float | None:
        """Largest finite value; exact where `Keep` keeps it."""
        return max(filter(math.isfinite, self._values.tolist()), default=None)

    def points(self) -> tuple[Floats, Floats]:
        """Iterations and values, FP64; all of them if they are few."""
        if len(self._values) > 2 * self._buckets:
            self._thin()
        return self._iterations, self._values

    def columns(self, width: int) -> tuple[Floats, Floats]:
        """Bucket numbers and one value of each, for buckets of `width`, a power of 2 not below `self.width`."""
        iterations, values = thin(self._iterations, self._values, width, self._keep)
        numbers = np.floor_divide(iterations, width)
        # A value that is not finite takes precedence over the finite one of its bucket.
        order = np.lexsort((~np.isfinite(values), numbers))
        newest = np.append(np.diff(numbers[order]) > 0, True)
        return numbers[order][newest], values[order][newest]

    def _thin(self) -> None:
        self.width = max(self.width, bucket_width(self._iterations[0], self._iterations[-1], self._buckets))
        self._iterations, self._values = thin(self._iterations, self._values, self.width, self._keep)


def bucket_width(first: float, last: float, buckets: int) -> int:
    """The smallest power of 2 such that at most about `buckets` buckets cover the iterations `first` to `last`."""
    return int(2 ** max(0, math.ceil(math.log2(max(1.0, (last - first + 1) / buckets)))))


def thin(iterations: Floats, values: Floats, width: int, keep: Keep) -> tuple[Floats, Floats]:
    """The points to keep of each bucket of `width` iterations, and one that is not finite, in order."""
    buckets = np.floor_divide(iterations, width)
    finite = np.isfinite(values)
    stays = np.zeros(len(values), dtype=bool)
    for group, ends in ((finite, keep), (~finite, Keep.SMALLEST)):
        places = np.flatnonzero(group)
        if not len(places):
            continue
        order = places[np.lexsort((values[places], buckets[places]))]
        changes = np.diff(buckets[order]) > 0
        if ends is not Keep.LARGEST:
            stays[order[np.insert(changes, 0, True)]] = True
        if ends is not Keep.SMALLEST:
            stays[order[np.append(changes, True)]] = True
    return iterations[stays], values[stays]
