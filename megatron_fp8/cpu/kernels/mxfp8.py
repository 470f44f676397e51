"""MXFP8: one E8M0 scale, a power of two, per 32 consecutive elements (TE's `MXFP8Quantizer`).

Layouts are TE's compact ones: bytes `[*rest, last]` for both usages; scales are bytes, rowwise `[m, k / 32]` padded to
multiples of (128, 4), columnwise `[m / 32, k]` padded to (4, 128). A GPU's GEMM reads swizzled scales; the one here
reads these, so no tensor is marked as swizzled.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels.blockwise import (
    Tile,
    decode_tiles,
    empty_blocks,
    encode_tiles,
    matrix_of,
    missing_usage,
    set_usages,
    tile_amax,
)
from megatron_fp8.cpu.kernels.casts import FP8_MAX, torch_dtype

_LENGTH = 32
# Exponent of E8M0's 0 and of its largest finite number; FP32 has the same bias.
_BIAS, _LARGEST = 127, 254
_MANTISSA_BITS = 23


def quantize_mxfp8(tensor: Tensor, quantizer: Any, output: Any, noop: bool) -> Any:
    """Quantize `tensor` (FP32, BF16, FP16) into `output` or a new tensor with the quantizer's usages.

    A block's scale is the smallest power of two with which its amax fits into FP8; with `with_2d_quantization` a block
    is 32 x 32 and both usages share its scale. An infinite amax gets the largest scale, 0 the smallest. Raises
    RuntimeError, as TE does, unless the last axis and the product of the others are divisible by 32.
    """
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    if rows % _LENGTH or columns % _LENGTH:
        raise RuntimeError(f"MXFP8 requires tensor dims that are divisible by {_LENGTH} (got shape={(rows, columns)})")
    if output is None:
        output = empty_mxfp8(quantizer, tensor.shape, tensor.dtype)
    else:
        set_usages(output, quantizer)
        output._with_gemm_swizzled_scales = False
    if noop or tensor.numel() == 0:
        return output
    matrix, square = matrix_of(tensor), quantizer.with_2d_quantization
    for columnwise in (False, True):
        if not (quantizer.columnwise_usage if columnwise else quantizer.rowwise_usage):
            continue
        data, scales = _quantize(
            matrix, torch_dtype(quantizer.dtype), (_LENGTH, _LENGTH) if square else _tile(columnwise)
        )
        if square:
            scales = scales.repeat_interleave(_LENGTH, dim=1 if columnwise else 0)
            scales = scales[:, : matrix.shape[1]] if columnwise else scales[: matrix.shape[0]]
        bytes_, buffer = _parts(output, columnwise)
        bytes_.view(data.shape).copy_(data)
        buffer[: scales.shape[0], : scales.shape[1]] = scales
    return output


def empty_mxfp8(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any = "cuda") -> Any:
    """A tensor of nominal `dtype` with undefined bytes."""
    return empty_blocks(quantizer, shape, dtype, device, with_gemm_swizzled_scales=False)


def mxfp8_values(storage: Any, columnwise: bool) -> tuple[Tensor, float]:
    """FP32 values `[*rest, last]` of one usage, and the factor 1.

    Raises RuntimeError if the tensor lacks that usage, NotImplementedError for swizzled scales.
    """
    data, scales = _parts(storage, columnwise)
    if data is None:
        raise missing_usage(storage, columnwise)
    if storage._with_gemm_swizzled_scales:
        raise NotImplementedError("MXFP8 tensors with swizzled scales have no CPU stand-in")
    matrix, tile = matrix_of(data), _tile(columnwise)
    tiles = [-(-size // length) for size, length in zip(matrix.shape, tile, strict=True)]
    exponents = scales[: tiles[0], : tiles[1]].to(torch.int32)
    # 2^-127 is below FP32's normal numbers: half the smallest of them.
    bits = torch.where(exponents == 0, 1 << (_MANTISSA_BITS - 1), exponents << _MANTISSA_BITS)
    values = decode_tiles(matrix, bits.view(torch.float32), torch_dtype(storage._fp8_dtype), tile)
    return values.reshape(data.shape), 1.0


def _tile(columnwise: bool) -> Tile:
    return (_LENGTH, 1) if columnwise else (1, _LENGTH)


def _parts(storage: Any, columnwise: bool) -> tuple[Any, Any]:
    if columnwise:
        return storage._columnwise_data, storage._columnwise_scale_inv
    return storage._rowwise_data, storage._rowwise_scale_inv


def _quantize(matrix: Tensor, fp8: torch.dtype, tile: Tile) -> tuple[Tensor, Tensor]:
    """Bytes `[m, k]` and biased exponents, uint8 `[m tiles, k tiles]`, of the scales to multiply with on decoding."""
    exponents = _e8m0(tile_amax(matrix, tile) * (1 / FP8_MAX[fp8]))
    # The inverse, 2^(127 - exponent); an all-zero block keeps its zeros with any scale, and 1 is TE's.
    inverse = torch.where(exponents == 0, _BIAS, _LARGEST - exponents)
    bits = torch.where(inverse == 0, 1 << (_MANTISSA_BITS - 1), inverse << _MANTISSA_BITS)
    return encode_tiles(matrix, bits.view(torch.float32), fp8, tile), exponents.to(torch.uint8)


def _e8m0(x: Tensor) -> Tensor:
    """Biased exponent, int32, of `x` >= 0 rounded up to a power of two; at most 254 (TE's `ptx.cuh`,
    `float_to_e8m0`)."""
    bits = x.view(torch.int32)
    exponents, mantissa = bits >> _MANTISSA_BITS, bits & ((1 << _MANTISSA_BITS) - 1)
    # Subnormals of at most 2^-127 are that number already.
    small = (exponents == 0) & (mantissa <= 1 << (_MANTISSA_BITS - 1))
    return torch.where((mantissa > 0) & ~small, exponents + 1, exponents).clamp_(max=_LARGEST)
