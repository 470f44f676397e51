"""Measures what quantization loses of a tensor: clipped and flushed shares, relative error."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A scale is rounded, so an amax quantized with the scale made from it may come back this much smaller.
_SLACK = 1 + 2.0**-16


@dataclass(frozen=True)
class TensorHealth:
    """What quantization did to a tensor.

    `clipped`: share of elements above the format's largest value, as which they are stored. `flushed`: share of the
    non-zero elements that became zero. `error`: ||x - q(x)|| / ||x||.

    An empty or all-zero tensor loses nothing (0, 0, 0); NaN or infinity in x makes `error` NaN, which exceeds every
    limit.
    """

    clipped: float
    flushed: float
    error: float

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise, -20 log10(error) in dB; infinite where nothing was lost."""
        return math.inf if self.error == 0 else -20 * math.log10(self.error)

    @classmethod
    def from_sums(cls, sums: Sequence[float]) -> "TensorHealth":
        """From what `quantization_sums` gives, added up over tensors of any number."""
        elements, nonzero, clipped, flushed, squared_error, squared_norm = sums
        error = math.sqrt(_share(squared_error, squared_norm)) if squared_error == squared_error else math.nan
        return cls(_share(clipped, elements), _share(flushed, nonzero), error)


def _share(part: float, whole: float) -> float:
    if math.isinf(whole) or math.isnan(whole):
        return math.nan
    return part / whole if whole else 0.0


def quantization_sums(x: Tensor, quantized: Tensor, at_limit: Tensor) -> Tensor:
    """Numbers of elements, non-zero, clipped and flushed ones, and the sums of (x - q(x))^2 and x^2: FP64 `[6]`.

    `x`, `quantized`: FP32, before and after. `at_limit`: where the format's largest value is stored. All of one shape.
    Does not synchronize with the device.
    """
    nonzero = x != 0
    sums = torch.zeros(6, dtype=torch.float64, device=x.device)
    sums[0] = x.numel()
    sums[1] = nonzero.sum()
    sums[2] = (at_limit & (x.abs() > quantized.abs() * _SLACK)).sum()
    sums[3] = (nonzero & (quantized == 0)).sum()
    # In FP64: squares of small gradients underflow in FP32.
    sums[4] = torch.linalg.vector_norm(quantized - x, dtype=torch.float64).square()
    sums[5] = torch.linalg.vector_norm(x, dtype=torch.float64).square()
    return sums
