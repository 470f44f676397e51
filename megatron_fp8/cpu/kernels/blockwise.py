"""FP8 with one FP32 scale for 128 consecutive elements (1D) or for 128 x 128 (2D): TE's `Float8BlockQuantizer`.

Layouts are TE's: columnwise bytes are the physical transpose `[last, *rest]`, because TE communicates them; inverse
scales are stored for its GEMM, 2D rowwise `[m tiles, k tiles]`, 1D rowwise `[k tiles, m]`, 1D columnwise
`[m tiles, k]`, 2D columnwise `[k tiles, m tiles]`, the last axis padded with zeros to a multiple of 4. The GEMM here
multiplies the dequantized FP32 numbers, exact with scales that are powers of two (the recipe's default). Must not
know GEMMs or modules.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels.blocks import (
    Tile,
    decode_tiles,
    empty_blocks,
    encode_tiles,
    matrix_of,
    missing_usage,
    set_usages,
    tile_amax,
)
from megatron_fp8.cpu.kernels.dtypes import FP8_MAX, torch_dtype
from megatron_fp8.cpu.kernels.scaling import scale_from_amax

_LENGTH = 128


def quantize_blockwise(tensor: Tensor, quantizer: Any, output: Any, noop: bool) -> Any:
    """Quantize `tensor` (FP32, BF16, FP16) by blocks into `output` or a new tensor of the quantizer's usages.

    With 1D blocks, rowwise and columnwise data are two quantizations of `tensor`. Blocks whose amax is 0, infinite or
    NaN alone get scale 1; those whose scale overflows FP32 get the largest number of tensor's dtype as scale.
    """
    if output is None:
        output = empty_blockwise(quantizer, tensor.shape, tensor.dtype)
    else:
        set_usages(output, quantizer)
    if noop or tensor.numel() == 0:
        return output
    matrix, square = matrix_of(tensor), quantizer.block_scaling_dim == 2
    if square:
        data, scale_inv = _quantize(matrix, quantizer, (_LENGTH, _LENGTH))
    if quantizer.rowwise_usage:
        if not square:
            data, scale_inv = _quantize(matrix, quantizer, (1, _LENGTH))
        output._rowwise_data.view(data.shape).copy_(data)
        _store(output._rowwise_scale_inv, scale_inv if square else scale_inv.t())
    if quantizer.columnwise_usage:
        if not square:
            data, scale_inv = _quantize(matrix, quantizer, (_LENGTH, 1))
        output._columnwise_data.copy_(data.t().reshape(output._columnwise_data.shape))
        _store(output._columnwise_scale_inv, scale_inv.t() if square else scale_inv)
    return output


def empty_blockwise(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any = "cuda") -> Any:
    """A tensor of nominal `dtype` with undefined bytes and zero scales."""
    return empty_blocks(quantizer, shape, dtype, device)


def blockwise_values(storage: Any, columnwise: bool) -> tuple[Tensor, float]:
    """FP32 numbers `[*rest, last]` of one usage, and the factor 1; with 2D blocks both usages hold the same numbers.

    Raises RuntimeError where the tensor does not hold that usage.
    """
    if storage._is_2D_scaled:
        columnwise = storage._rowwise_data is None
    data = storage._columnwise_data if columnwise else storage._rowwise_data
    if data is None:
        raise missing_usage(storage, columnwise)
    fp8, square = torch_dtype(storage._fp8_dtype), storage._is_2D_scaled
    tile = (_LENGTH, _LENGTH) if square else (1, _LENGTH)
    # Columnwise bytes are a matrix of the same kind, transposed: 1D blocks lie along its last axis too.
    matrix = data.reshape(data.shape[0] if data.dim() else 1, -1) if columnwise else matrix_of(data)
    scale_inv = storage._columnwise_scale_inv if columnwise else storage._rowwise_scale_inv
    tiles = [-(-size // length) for size, length in zip(matrix.shape, tile, strict=True)]
    scale_inv = scale_inv[: tiles[0], : tiles[1]] if square else scale_inv[: tiles[1], : tiles[0]].t()
    values = decode_tiles(matrix.contiguous(), scale_inv, fp8, tile).reshape(data.shape)
    return values.movedim(0, -1) if columnwise and data.dim() else values, 1.0


def dequantize_blockwise(storage: Any, dtype: torch.dtype) -> Tensor:
    """Numbers of the tensor, of its rowwise bytes if it has them, rounded once to `dtype`."""
    values, _ = blockwise_values(storage, storage._rowwise_data is None)
    return values.to(dtype).contiguous()


def _quantize(matrix: Tensor, quantizer: Any, tile: Tile) -> tuple[Tensor, Tensor]:
    """Bytes `[m, k]` and inverse scales `[m tiles, k tiles]`."""
    fp8 = torch_dtype(quantizer.dtype)
    overflow = torch.finfo(matrix.dtype).max
    peaks = tile_amax(matrix, tile)
    scale = scale_from_amax(peaks, FP8_MAX[fp8], quantizer.force_pow_2_scales, quantizer.amax_epsilon, overflow)
    return encode_tiles(matrix, scale, fp8, tile), scale.reciprocal()


def _store(buffer: Tensor, scale_inv: Tensor) -> None:
    buffer[: scale_inv.shape[0], : scale_inv.shape[1]] = scale_inv
