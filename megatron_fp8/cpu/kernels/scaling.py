"""Owns the scale update of delayed scaling. Must not know modules or groups."""

from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels import casts
from megatron_fp8.cpu.kernels.quantize import torch_dtype

__all__ = ["fused_amax_and_scale_update_after_reduction"]

_FP32_MAX = torch.finfo(torch.float32).max


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Enter the reduced amaxes into the histories, roll them, and compute the next scales, all in place.

    `amax_reduction_buffer`: FP32, the amaxes of all modules one after the other. Each history is FP32
    `[history_len, num_operands]`, each scale FP32 `[num_operands]`. `amax_compute_algo`: `max` or `most_recent`.
    Row 0 of a history is the step that just ended; afterwards it is 0 and the step stands in the last row.

    `scale = fp8_max / amax / 2^margin`. Degenerate amaxes: 0, infinite or NaN keep the old scale; so small that the
    scale overflows gives the FP32 maximum (TE, `quantization.py`, `_default_sf_compute`).
    """
    if amax_compute_algo not in ("max", "most_recent"):
        raise ValueError(f"amax_compute_algo is {amax_compute_algo!r}; use 'max' or 'most_recent'")
    fp8_max = casts.largest(torch_dtype(fp8_dtype))
    amaxes = amax_reduction_buffer.split([scale.numel() for scale in scales])
    for reduced, history, scale in zip(amaxes, amax_histories, scales, strict=True):
        history[0].copy_(reduced)
        amax = history.amax(dim=0) if amax_compute_algo == "max" else history[0].clone()
        history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()
        new = (fp8_max / amax) / (2**margin)
        new = torch.where(torch.isinf(new), torch.full_like(new, _FP32_MAX), new)
        scale.copy_(torch.where(torch.isfinite(amax) & (amax > 0), new, scale))
