"""Quantizing one piece of a block-scaled weight: what a rank of the distributed optimizer owns of it.

A piece is a run of consecutive elements of the row-major weight `[h, w]`, starting at element `start_offset`; it may
begin and end inside a row and inside a block. Amaxes are found piece by piece, reduced over the ranks by TE, and each
rank casts its piece with the scales of the whole blocks. Must not know optimizers or process groups.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels.blocks import tile_amax
from megatron_fp8.cpu.kernels.casts import encode_fp8
from megatron_fp8.cpu.kernels.dtypes import torch_dtype

__all__ = ["fp8_block_scaling_compute_partial_amax", "fp8_block_scaling_partial_cast"]


def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Write the piece's largest magnitude in each block into `amax`, FP32 `[>= h blocks, >= w blocks]`.

    tensor: FP32 or BF16 `[n]`. Blocks that the piece does not touch get 0; NaNs are passed over.
    """
    amax.zero_()
    if tensor.numel() == 0:
        return
    _check_piece(tensor, h, w, start_offset)
    first, last = _block_rows(tensor, h, w, start_offset, block_len)
    rows = torch.zeros(last - first, w, dtype=tensor.dtype, device=tensor.device)
    rows.view(-1)[start_offset - first * w :][: tensor.numel()].copy_(tensor)
    peaks = tile_amax(rows, (block_len, block_len))
    first_block = first // block_len
    amax[first_block : first_block + peaks.shape[0], : peaks.shape[1]].copy_(peaks)


def fp8_block_scaling_partial_cast(
    inp: Tensor, out: Tensor, scale: Tensor, h: int, w: int, start_offset: int, block_len: int, out_dtype: Any
) -> None:
    """Write the piece's bytes, times the scales of their blocks, saturated and rounded to nearest even, into `out`.

    inp: FP32 or BF16 `[n]`; out: uint8 `[n]`; scale: FP32 `[>= h blocks, >= w blocks]`.
    """
    if inp.numel() == 0:
        return
    _check_piece(inp, h, w, start_offset)
    first, last = _block_rows(inp, h, w, start_offset, block_len)
    blocks = scale[first // block_len : -(-last // block_len), : -(-w // block_len)]
    rows = blocks.repeat_interleave(block_len, dim=0)[: last - first].repeat_interleave(block_len, dim=1)[:, :w]
    scales = rows.reshape(-1)[start_offset - first * w :][: inp.numel()]
    encode_fp8(inp, scales, torch_dtype(out_dtype), out=out)


def _block_rows(piece: Tensor, h: int, w: int, start_offset: int, block_len: int) -> tuple[int, int]:
    """First row and end row of the rows of blocks that the piece touches."""
    end_row = -(-(start_offset + piece.numel()) // w)
    return start_offset // w // block_len * block_len, min(h, -(-end_row // block_len) * block_len)


def _check_piece(piece: Tensor, h: int, w: int, start_offset: int) -> None:
    if start_offset < 0 or start_offset + piece.numel() > h * w:
        raise ValueError(f"elements {start_offset} to {start_offset + piece.numel()} are not all in {h} x {w}")
