"""Scales from amaxes: delayed scaling's update and the scale of one tensor. Must not know modules or groups."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels.casts import amax as largest_magnitude
from megatron_fp8.cpu.kernels.dtypes import FP8_MAX, FP32_MAX, torch_dtype

__all__ = ["FP8TensorMeta", "compute_amax", "fused_amax_and_scale_update_after_reduction"]


@dataclass
class FP8TensorMeta:
    """Scales and amax history of a module's FP8 tensors, as TE's operation API fills them in."""

    scale: Tensor | None = None
    scale_inv: Tensor | None = None
    amax_history: Tensor | None = None


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Enter the reduced amaxes into the histories, roll them, and compute the next scales, all in place.

    amax_reduction_buffer: FP32, the amaxes of all modules one after the other; empty where nothing was reduced, and
    then row 0 of each history stands. Each history is FP32 `[history_length, operands]`, of any length, each scale
    FP32 `[operands]`. amax_compute_algo: `max` over the history or `most_recent`. Row 0 of a history is the step
    that just ended; afterwards it is 0 and that step stands in the last row.

    `scale = fp8_max / amax / 2^margin`. Degenerate amaxes: 0, infinite or NaN (also somewhere in the history with
    `max`) keep the old scale; so small that the scale overflows gives the FP32 maximum. Source: TE's Python,
    `quantization.py`, `_default_get_amax_and_update_history` and `_default_sf_compute`, to which this is equal bit
    for bit: `number / tensor` of torch multiplies with the reciprocal. TE's CUDA kernel divides, which may differ in
    the last bit, and passes over NaNs, which its quantize kernels never write.

    Raises ValueError for another algorithm.
    """
    if amax_compute_algo not in ("max", "most_recent"):
        raise ValueError(f"amax_compute_algo is {amax_compute_algo!r}; use 'max' or 'most_recent'")
    if not amax_histories:
        return
    if amax_reduction_buffer.numel():
        reduced = amax_reduction_buffer.split([scale.numel() for scale in scales])
        torch._foreach_copy_([history[0] for history in amax_histories], reduced)
    whole = amax_compute_algo == "max"
    amaxes = torch.cat([history.amax(dim=0) if whole else history[0] for history in amax_histories])
    for history in amax_histories:
        # The oldest row falls out; the newest goes to the end.
        history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()
    # All modules at once: an operation costs more than these few numbers.
    new = (FP8_MAX[torch_dtype(fp8_dtype)] / amaxes) / (2**margin)
    new = torch.where(torch.isfinite(amaxes) & (amaxes > 0), new, torch.cat(scales))
    new = torch.where(torch.isinf(new), FP32_MAX, new)
    torch._foreach_copy_(scales, new.split([scale.numel() for scale in scales]))


def scale_from_amax(
    amax: Tensor, fp8_max: float, force_pow_2_scales: bool, epsilon: float, overflow: float = FP32_MAX
) -> Tensor:
    """Scales for blocks or tensors whose largest magnitudes are `amax` (FP32, any shape), of the same shape.

    Degenerate amaxes: below `epsilon` counts as epsilon; 0, infinite or NaN gives 1; so small that the scale is
    infinite gives `overflow`. `force_pow_2_scales` rounds down to a power of two. Source: TE,
    `common/recipe/recipe_common.cuh`, `compute_scale_from_amax`.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    # `fp8_max / amax` would multiply with the reciprocal and round twice.
    scale = torch.div(torch.tensor(fp8_max), amax)
    scale = torch.where(torch.isinf(scale), overflow, scale)
    if force_pow_2_scales:
        # Without the mantissa: the power of two at or below.
        scale = scale.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    return torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)


def compute_amax(input: Tensor, amax: Tensor) -> None:
    """Write the largest magnitude of `input` (FP32, BF16 or FP16) into `amax`, FP32 with one element."""
    amax.fill_(largest_magnitude(input))
