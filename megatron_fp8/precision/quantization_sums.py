"""Owns the sums over a tensor and its quantized form that `TensorHealth` is made of. Must not know FP8 libraries."""

import torch
from torch import Tensor

from megatron_fp8.precision.tensor_health import NUM_SUMS

# Rounding of scales: an amax quantized with the scale made from it may come back this much smaller.
_SLACK = 1 + 2.0**-16


def quantization_sums(x: Tensor, quantized: Tensor, at_limit: Tensor) -> Tensor:
    """The sums that `TensorHealth.from_sums` takes, FP64 `[6]` on the device, without waiting for it.

    `x`: FP32. `quantized`: what is left of it, FP32. `at_limit`: where the format's largest number is stored. All of
    one shape.
    """
    nonzero = x != 0
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=x.device)
    sums[0] = x.numel()
    sums[1] = nonzero.sum()
    sums[2] = (at_limit & (x.abs() > quantized.abs() * _SLACK)).sum()
    sums[3] = (nonzero & (quantized == 0)).sum()
    # In FP64: squares of small gradients are below FP32's numbers.
    sums[4] = torch.linalg.vector_norm(quantized - x, dtype=torch.float64).square()
    sums[5] = torch.linalg.vector_norm(x, dtype=torch.float64).square()
    return sums
