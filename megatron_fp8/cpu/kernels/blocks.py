"""FP8 data with one scale a tile: tiling, amaxes, casts and TE's tensors that hold them.

A tile is `rows x columns` of the matrix that a tensor is by its last axis; tiles at the edges may be smaller. Must not
know which tiles and which scales a recipe asks for, nor how TE lays scales out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels.casts import decode_fp8, encode_fp8

Tile = tuple[int, int]
_PARTS = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")


def tile_amax(matrix: Tensor, tile: Tile) -> Tensor:
    """Largest magnitude in each tile of `matrix` `[m, k]`, FP32 `[m tiles, k tiles]`; NaNs are passed over."""
    tiles = _tiled(matrix, tile)
    peaks = tiles.abs().amax(dim=(1, 3))
    if torch.isnan(peaks).any():
        peaks = torch.where(torch.isnan(tiles), 0.0, tiles.abs()).amax(dim=(1, 3))
    return peaks.to(torch.float32)


def encode_tiles(matrix: Tensor, scale: Tensor, fp8: torch.dtype, tile: Tile) -> Tensor:
    """Bytes `[m, k]` of `matrix` times its tiles' scales (FP32 `[m tiles, k tiles]`), saturated, to nearest even."""
    tiles = _tiled(matrix, tile)
    data = torch.empty(tiles.shape, dtype=torch.uint8)
    encode_fp8(tiles, scale[:, None, :, None], fp8, out=data)
    return _untiled(data, matrix.shape)


def decode_tiles(data: Tensor, scale_inv: Tensor, fp8: torch.dtype, tile: Tile) -> Tensor:
    """FP32 numbers `[m, k]` of bytes and their tiles' inverse scales (FP32 `[m tiles, k tiles]`)."""
    values, factor = decode_fp8(data, fp8)
    tiles = _tiled(values.mul_(factor), tile)
    return _untiled(tiles.mul_(scale_inv[:, None, :, None]), data.shape)


def _tiled(matrix: Tensor, tile: Tile) -> Tensor:
    """`[m tiles, rows, k tiles, columns]`, a view where the tiles fit and padded with zeros where not."""
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


def empty_blocks(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, **options: Any) -> Any:
    """A tensor of nominal `dtype` with undefined bytes and zero scales, in the layout that TE's quantizer describes."""
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
    """Give `output` the buffers of the quantizer's usages and no others, keeping those that it has."""
    specs = quantizer.inner_tensor_specs(tuple(output.size()))
    for name in _PARTS:
        if name not in specs:
            setattr(output, name, None)
        elif getattr(output, name) is None:
            shape, dtype = specs[name]
            setattr(output, name, torch.zeros(shape, dtype=dtype))
    output._fp8_dtype = quantizer.dtype


def missing_usage(storage: Any, columnwise: bool) -> RuntimeError:
    """The error for a GEMM that reads a usage which the tensor does not hold."""
    usage = "columnwise" if columnwise else "rowwise"
    return RuntimeError(
        f"{type(storage).__name__} holds no {usage} data, which this GEMM reads; see its update_usage()"
    )
