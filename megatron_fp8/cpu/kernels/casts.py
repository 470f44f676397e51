"""Float8 numbers: dtypes, casts by value, amaxes and the scales made from them.

E4M3: 1 sign, 4 exponent (bias 7), 3 mantissa bits, largest 448, no infinities, NaN is S.1111.111. E5M2: 1, 5 (bias
15), 2 bits, largest 57344, infinities and NaNs. Casts saturate and round to nearest even, as TE's kernels do.

Rates on one AMD Zen 3 core for `[2048, 2752]`, in 10^9 elements a second. To FP32: E4M3 by torch's cast 0.3, by bit
operations 1.9 (used); E5M2 2.3 by bit operations (used), 1.3 by torch; the two NaN checks 30. BF16 to E4M3 in one piece
0.7, in blocks 0.8, without the clamp 0.9; to E5M2 0.9, 1.15 and 1.3. torch's casts alone run at 1.3 and 2.3; rounding
by integer arithmetic or a magic number takes eight passes and is slower. amax by `aminmax` 8.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.enums import DType

__all__ = ["FP8TensorMeta", "compute_amax", "fused_amax_and_scale_update_after_reduction"]

_TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FP32_MAX = torch.finfo(torch.float32).max


def torch_dtype(te_dtype: Any) -> torch.dtype:
    """The torch dtype of a TE `DType` (the extension's or TE's Python's) or its integer. Raises KeyError for FP4."""
    return _TORCH_DTYPES[DType(int(te_dtype))]


# FP32 values at a time: 1 MiB stays in cache; smaller blocks cost more calls.
_BLOCK_ELEMENTS = 2**18
# FP16's exponent bias is 15 and E4M3's is 7.
_E4M3_PER_FP16 = 256.0


def encode_fp8(x: Tensor, scale: Tensor, fp8: torch.dtype, out: Tensor, bound: float = math.inf) -> None:
    """Write the bytes of `x * scale`, multiplied in FP32, saturated and rounded to nearest even, to `out`.

    x: FP32, BF16 or FP16; scale: FP32 with one element, or broadcast over x; out: uint8 of x's shape, any strides.
    bound: an upper bound of |x|, NaNs aside; the clamp is skipped if it rules out saturation. NaN stays NaN; infinities
    saturate to the largest finite value.
    """
    limit, one_scale = FP8_MAX[fp8], scale.numel() == 1
    factor = scale.reshape(()) if one_scale else scale
    # The product of two FP32 numbers is exact as a Python float, and rounding is monotonic.
    saturates = not bound * float(factor.amax()) <= limit if factor.numel() else False
    bytes_ = out.view(fp8)
    if one_scale and x.is_contiguous() and out.is_contiguous():
        blocks = zip(x.view(-1).split(_BLOCK_ELEMENTS), bytes_.view(-1).split(_BLOCK_ELEMENTS), strict=True)
    else:
        blocks = zip([x], [bytes_], strict=True)
    for numbers, target in blocks:
        scaled = torch.mul(numbers, factor) if x.dtype == torch.float32 else numbers.to(torch.float32).mul_(factor)
        # torch's casts do not saturate: E4M3 would give NaN from 464 and E5M2 infinity from 61440 up.
        target.copy_(scaled.clamp_(-limit, limit) if saturates else scaled)


def decode_fp8(data: Tensor, fp8: torch.dtype) -> tuple[Tensor, float]:
    """FP32 values and a power of two whose product is exactly the float8 values of `data` (uint8, any shape).

    The power goes into a GEMM's `alpha`, where it is free. NaN stays NaN.
    """
    if fp8 == torch.float8_e5m2:
        # An E5M2 byte is the upper half of the FP16 number of the same value.
        bits = data.to(torch.int16).mul_(256)
        return bits.view(torch.float16).to(torch.float32), 1.0
    if _has_e4m3_nan(data):
        return data.view(fp8).to(torch.float32), 1.0
    # Sign-extended and shifted by 7, the byte's sign, exponent and mantissa are at FP16's positions, except that bit 14
    # is a second copy of the sign.
    bits = data.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(~0x4000)
    return bits.view(torch.float16).to(torch.float32), _E4M3_PER_FP16


def _has_e4m3_nan(data: Tensor) -> bool:
    """Whether any byte is 0x7F, the largest as a signed number, or 0xFF, the largest as an unsigned one."""
    if data.numel() == 0:
        return False
    return int(data.view(torch.int8).max()) == 0x7F or int(data.max()) == 0xFF


def tensor_amax(x: Tensor) -> Tensor:
    """Amax of `x` as FP32 `[]`, 0 for an empty tensor. NaNs are ignored, as by `fmaxf` in TE's kernels."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32)
    result = _peak(x)
    if torch.isnan(result):
        result = _peak(torch.nan_to_num(x, nan=0.0, posinf=torch.inf, neginf=-torch.inf))
    return result


def _peak(x: Tensor) -> Tensor:
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).to(torch.float32)


@dataclass
class FP8TensorMeta:
    """Scales and amax history of a module's FP8 tensors, filled in by TE's operation API."""

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

    amax_reduction_buffer: FP32, the amaxes of all modules, concatenated; if empty, row 0 of each history is used. Each
    history is FP32 `[history_length, operands]`, each scale FP32 `[operands]`. amax_compute_algo: `max` over the
    history or `most_recent`; ValueError for another. Row 0 of a history is the step that just ended; afterwards it is 0
    and that step is the last row.

    `scale = fp8_max / amax / 2^margin`. An amax of 0, infinity or NaN (with `max`, anywhere in the history) keeps the
    old scale; one so small that the scale overflows gives the FP32 maximum. Bitwise equal to TE's Python
    (`quantization.py`, `_default_get_amax_and_update_history` and `_default_sf_compute`): `number / tensor` in torch
    multiplies by the reciprocal. TE's CUDA kernel divides, which may differ in the last bit, and ignores NaNs, which
    its quantize kernels never write.
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
        history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()
    # All modules at once: the cost is per operation.
    new = (FP8_MAX[torch_dtype(fp8_dtype)] / amaxes) / (2**margin)
    new = torch.where(torch.isfinite(amaxes) & (amaxes > 0), new, torch.cat(scales))
    new = torch.where(torch.isinf(new), FP32_MAX, new)
    torch._foreach_copy_(scales, new.split([scale.numel() for scale in scales]))


def scale_from_amax(
    amax: Tensor, fp8_max: float, force_pow_2_scales: bool, epsilon: float, overflow: float = FP32_MAX
) -> Tensor:
    """Scales for blocks or tensors with amaxes `amax` (FP32, any shape), of the same shape.

    An amax below `epsilon` counts as epsilon; 0, infinity or NaN gives scale 1; one so small that the scale is infinite
    gives `overflow`. `force_pow_2_scales` rounds down to a power of two. Source: TE's `recipe_common.cuh`,
    `compute_scale_from_amax`.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    # `fp8_max / amax` would multiply by the reciprocal and round twice.
    scale = torch.div(torch.tensor(fp8_max), amax)
    scale = torch.where(torch.isinf(scale), overflow, scale)
    if force_pow_2_scales:
        # Without the mantissa: the power of two at or below.
        scale = scale.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    return torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)


def compute_amax(input: Tensor, amax: Tensor) -> None:
    """Write the amax of `input` (FP32, BF16 or FP16) to `amax`, FP32 with one element."""
    amax.fill_(tensor_amax(input))
