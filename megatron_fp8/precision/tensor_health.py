"""Owns what is said about one FP8 tensor: how much of it quantization lost, from sums over its elements.

Plain numbers; imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NUM_SUMS = 6


@dataclass(frozen=True)
class TensorHealth:
    """What quantization did to a tensor.

    `clipped`: share of elements stored as the format's largest number although they were larger. `flushed`: share of
    the non-zero elements that became zero. `error`: ||x - q(x)|| / ||x||. `sqnr_db`: signal to quantization noise,
    -20 log10(error), in dB.

    Degenerate inputs: without elements, or all zero, nothing was lost (0, 0, 0, infinite dB); NaN or infinity in x
    makes `error` NaN, which is over every limit.
    """

    clipped: float
    flushed: float
    error: float

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise."""
        return math.inf if self.error == 0 else -20 * math.log10(self.error)

    @classmethod
    def from_sums(cls, sums: Sequence[float]) -> "TensorHealth":
        """From the numbers of elements, of non-zero ones, of clipped ones and of flushed ones, and the sums of
        (x - q(x))^2 and x^2."""
        elements, nonzero, clipped, flushed, squared_error, squared_norm = sums
        error = math.sqrt(_share(squared_error, squared_norm)) if squared_error == squared_error else math.nan
        return cls(_share(clipped, elements), _share(flushed, nonzero), error)


def _share(part: float, whole: float) -> float:
    if math.isinf(whole) or math.isnan(whole):
        return math.nan
    return part / whole if whole else 0.0
