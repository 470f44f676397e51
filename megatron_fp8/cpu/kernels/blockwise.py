"""FP8 with one FP32 scale per 1 x 128 or 128 x 128 elements (`Float8BlockQuantizer`), and tiles, shared with MXFP8.

A tile is `rows x columns` of the matrix `[product of leading axes, last]`; tiles at the edges may be smaller. Layouts
are TE's: columnwise bytes are the physical transpose `[last, *rest]`, because TE communicates them; inverse scales are
stored for its GEMM, 2D rowwise `[m tiles, k tiles]`, 1D rowwise `[k tiles, m]`, 1D columnwise `[m tiles, k]`, 2D
columnwise `[k tiles, m tiles]`, the last axis zero-padded to a multiple of 4. The GEMM here multiplies dequantized FP32
numbers, which is exact when scales are powers of two (the recipe's default).

The `partial` functions quantize the shard of a weight `[h, w]` that a rank of the distributed optimizer owns: elements
of the row-major weight from `start_offset` on, which may begin and end inside a row or block. TE reduces the shards'
amaxes over ranks, and each rank casts its shard with the scales of whole blocks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels.casts import FP8_MAX, decode_fp8, encode_fp8, scale_from_amax, torch_dtype

__all__ = ["fp8_block_scaling_compute_partial_amax", "fp8_block_scaling_partial_cast"]

Tile = tuple[int, int]
_PARTS = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")


def tile_amax(matrix: Tensor, tile: Tile) -> Tensor:
    """Amax of each tile of `matrix` `[m, k]`, FP32 `[m tiles, k tiles]`; NaNs are ignored."""
    tiles = _tiled(matrix, tile)
    peaks = tiles.abs().amax(dim=(1, 3))
    if torch.isnan(peaks).any():
        peaks = torch.where(torch.isnan(tiles), 0.0, tiles.abs()).amax(dim=(1, 3))
    return peaks.to(torch.float32)


def encode_tiles(matrix: Tensor, scale: Tensor, fp8: torch.dtype, tile: Tile) -> Tensor:
    """Bytes `[m, k]` of `matrix` times its tiles' scales, FP32 `[m tiles, k tiles]`."""
    tiles = _tiled(matrix, tile)
    data = torch.empty(tiles.shape, dtype=torch.uint8)
    encode_fp8(tiles, scale[:, None, :, None], fp8, out=data)
    return _untiled(data, matrix.shape)


def decode_tiles(data: Tensor, scale_inv: Tensor, fp8: torch.dtype, tile: Tile) -> Tensor:
    """FP32 values `[m, k]` of bytes and their tiles' inverse scales, FP32 `[m tiles, k tiles]`."""
    values, factor = decode_fp8(data, fp8)
    tiles = _tiled(values.mul_(factor), tile)
    return _untiled(tiles.mul_(scale_inv[:, None, :, None]), data.shape)


def _tiled(matrix: Tensor, tile: Tile) -> Tensor:
    """`[m tiles, rows, k tiles, columns]`: a view, or a zero-padded copy if tiles at the edges are smaller."""
    missing = [-size % length for size, length in zip(matrix.shape, tile, strict=True)]
    if any(missing):
        matrix = torch.nn.functional.pad(matrix, (0, missing[1], 0, missing[0]))
    rows, columns = tile
    return matrix.view(matrix.shape[0] // rows, rows, matrix.shape[1] // columns, columns)


def _untiled(tiles: Tensor, shape: Sequence[int]) -> Tensor:
    row_tiles, rows, column_tiles, columns = tiles.shape
    return tiles.view(row_tiles * rows, column_tiles * columns)[: shape[0], : shape[1]]


def matrix_of(tensor: Tensor) -> Tensor:
    """Contiguous `[product of the leading axes, last]`; `[1, 1]` of a tensor without axes."""
    return tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1).contiguous()


def empty_blocks(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any = "cuda", **options: Any) -> Any:
    """A tensor of nominal `dtype` with undefined bytes and zero scales, laid out as TE's quantizer specifies."""
    described = quantizer.storage_metadata(dtype)
    parts: dict[str, Any] = {name.removeprefix("_"): None for name in _PARTS}
    for name, (part_shape, part_dtype) in quantizer.inner_tensor_specs(tuple(shape)).items():
        parts[name.removeprefix("_")] = torch.zeros(part_shape, dtype=part_dtype, device=device)
    arguments = described["nontensor_kwargs"] | parts | options
    if not quantizer.internal:
        # The tensor classes call the nominal dtype `dtype`, their storages `fake_dtype`.
        del arguments["fake_dtype"]
        arguments |= {"shape": torch.Size(shape), "dtype": dtype, "device": torch.device(device)}
    return described["cls"](**arguments)


def set_usages(output: Any, quantizer: Any) -> None:
    """Give `output` the buffers of the quantizer's usages and no others, keeping existing ones."""
    specs = quantizer.inner_tensor_specs(tuple(output.size()))
    for name in _PARTS:
        if name not in specs:
            setattr(output, name, None)
        elif getattr(output, name) is None:
            shape, dtype = specs[name]
            setattr(output, name, torch.zeros(shape, dtype=dtype))
    output._fp8_dtype = quantizer.dtype


def missing_usage(storage: Any, columnwise: bool) -> RuntimeError:
    """The error for a GEMM that reads a usage which the tensor lacks."""
    usage = "columnwise" if columnwise else "rowwise"
    return RuntimeError(f"{type(storage).__name__} has no {usage} data, which this GEMM reads; see its update_usage()")


_LENGTH = 128


def quantize_blockwise(tensor: Tensor, quantizer: Any, output: Any, noop: bool) -> Any:
    """Quantize `tensor` (FP32, BF16, FP16) into `output` or a new tensor with the quantizer's usages.

    With 1D blocks, rowwise and columnwise data are two quantizations of `tensor`. Blocks whose amax is 0, infinite or
    only NaN get scale 1; those whose scale overflows FP32 get the largest number of tensor's dtype as scale.
    """
    if output is None:
        output = empty_blocks(quantizer, tensor.shape, tensor.dtype)
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


def blockwise_values(storage: Any, columnwise: bool) -> tuple[Tensor, float]:
    """FP32 values `[*rest, last]` of one usage, and the factor 1; with 2D blocks both usages have the same values.

    Raises RuntimeError if the tensor lacks that usage.
    """
    if storage._is_2D_scaled:
        columnwise = storage._rowwise_data is None
    data = storage._columnwise_data if columnwise else storage._rowwise_data
    if data is None:
        raise missing_usage(storage, columnwise)
    fp8, square = torch_dtype(storage._fp8_dtype), storage._is_2D_scaled
    tile = (_LENGTH, _LENGTH) if square else (1, _LENGTH)
    # Columnwise bytes are the transposed matrix: 1D blocks lie along its last axis too.
    matrix = data.reshape(data.shape[0] if data.dim() else 1, -1) if columnwise else matrix_of(data)
    scale_inv = storage._columnwise_scale_inv if columnwise else storage._rowwise_scale_inv
    tiles = [-(-size // length) for size, length in zip(matrix.shape, tile, strict=True)]
    scale_inv = scale_inv[: tiles[0], : tiles[1]] if square else scale_inv[: tiles[1], : tiles[0]].t()
    values = decode_tiles(matrix.contiguous(), scale_inv, fp8, tile).reshape(data.shape)
    return values.movedim(0, -1) if columnwise and data.dim() else values, 1.0


def _quantize(matrix: Tensor, quantizer: Any, tile: Tile) -> tuple[Tensor, Tensor]:
    """Bytes `[m, k]` and inverse scales `[m tiles, k tiles]`."""
    fp8 = torch_dtype(quantizer.dtype)
    overflow = torch.finfo(matrix.dtype).max
    peaks = tile_amax(matrix, tile)
    scale = scale_from_amax(peaks, FP8_MAX[fp8], quantizer.force_pow_2_scales, quantizer.amax_epsilon, overflow)
    return encode_tiles(matrix, scale, fp8, tile), scale.reciprocal()


def _store(buffer: Tensor, scale_inv: Tensor) -> None:
    buffer[: scale_inv.shape[0], : scale_inv.shape[1]] = scale_inv


def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Write the shard's amax in each block to `amax`, FP32 `[>= h blocks, >= w blocks]`, 0 in blocks outside it.

    tensor: FP32 or BF16 `[n]`. NaNs are ignored.
    """
    amax.zero_()
    if tensor.numel() == 0:
        return
    _check_shard(tensor, h, w, start_offset)
    first, last = _block_rows(tensor, h, w, start_offset, block_len)
    rows = torch.zeros(last - first, w, dtype=tensor.dtype, device=tensor.device)
    rows.view(-1)[start_offset - first * w :][: tensor.numel()].copy_(tensor)
    peaks = tile_amax(rows, (block_len, block_len))
    first_block = first // block_len
    amax[first_block : first_block + peaks.shape[0], : peaks.shape[1]].copy_(peaks)


def fp8_block_scaling_partial_cast(
    inp: Tensor, out: Tensor, scale: Tensor, h: int, w: int, start_offset: int, block_len: int, out_dtype: Any
) -> None:
    """Write the shard's bytes, quantized with the scales of their blocks, to `out`.

    inp: FP32 or BF16 `[n]`; out: uint8 `[n]`; scale: FP32 `[>= h blocks, >= w blocks]`.
    """
    if inp.numel() == 0:
        return
    _check_shard(inp, h, w, start_offset)
    first, last = _block_rows(inp, h, w, start_offset, block_len)
    blocks = scale[first // block_len : -(-last // block_len), : -(-w // block_len)]
    rows = blocks.repeat_interleave(block_len, dim=0)[: last - first].repeat_interleave(block_len, dim=1)[:, :w]
    scales = rows.reshape(-1)[start_offset - first * w :][: inp.numel()]
    encode_fp8(inp, scales, torch_dtype(out_dtype), out=out)


def _block_rows(shard: Tensor, h: int, w: int, start_offset: int, block_len: int) -> tuple[int, int]:
    """First and end row of the rows of blocks that the shard overlaps."""
    end_row = -(-(start_offset + shard.numel()) // w)
    return start_offset // w // block_len * block_len, min(h, -(-end_row // block_len) * block_len)


def _check_shard(shard: Tensor, h: int, w: int, start_offset: int) -> None:
    if start_offset < 0 or start_offset + shard.numel() > h * w:
        raise ValueError(f"elements {start_offset} to {start_offset + shard.numel()} are not all in {h} x {w}")
