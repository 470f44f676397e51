"""Packed sequences (`thd`) of `transformer_engine_torch`: to and from padded batches, and across context ranks.

Must not know attention. The half-tensor corrections of context-parallel attention over packed sequences have no
stand-in.
"""

import itertools

import torch
from torch import Tensor

__all__ = ["convert_bshd_to_thd", "convert_thd_to_bshd", "thd_get_partitioned_indices"]


def _ranges(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """First and past-the-last token of every sequence."""
    return list(itertools.pairwise(cu_seqlens.tolist()))


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """Packed `[t, h, d]` as `[b, max_seq_len, h, d]`, zero after each sequence; cu_seqlens: int32 `[b + 1]`."""
    out = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    for row, (start, stop) in zip(out, _ranges(cu_seqlens), strict=True):
        row[: stop - start] = tensor[start:stop]
    return out


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """Padded `[b, s, h, d]` as packed `[t, h, d]`, zero after the last sequence."""
    out = tensor.new_zeros(t, *tensor.shape[2:])
    for row, (start, stop) in zip(tensor, _ranges(cu_seqlens), strict=True):
        out[start:stop] = row[: stop - start]
    return out


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Tokens of a packed tensor that a context-parallel rank holds, int32 `[total_tokens / world_size]`.

    Every sequence is cut into 2 * world_size equal chunks; a rank holds the one at its place and the one at its place
    from the end. Raises ValueError for a sequence that cannot be cut so.
    """
    parts = []
    for start, stop in _ranges(cu_seqlens):
        chunk, rest = divmod(stop - start, 2 * world_size)
        if rest:
            raise ValueError(
                f"a sequence of {stop - start} tokens cannot be cut into {2 * world_size} chunks for {world_size} "
                f"context-parallel ranks; pad it to a multiple of {2 * world_size}"
            )
        for place in (rank, 2 * world_size - 1 - rank):
            parts.append(torch.arange(start + place * chunk, start + (place + 1) * chunk, dtype=torch.int32))
    indices = torch.cat(parts)
    if indices.numel() * world_size != total_tokens:
        raise ValueError(f"cu_seqlens ends at {int(cu_seqlens[-1])}, but there are {total_tokens} tokens")
    return indices
