"""Memory layouts of attention tensors: views as `[b, h, s, d]`, sequences within batches, packing, the KV cache.

Layout names are TE's (`sbhd`, `bshd`, `thd`, `bhsd`, packed forms such as `sb3hd`). The half-tensor corrections of
context-parallel attention over packed sequences are not implemented.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.enums import NVTE_QKV_Format, NVTE_QKV_Layout

__all__ = ["convert_bshd_to_thd", "convert_thd_to_bshd", "copy_to_kv_cache", "thd_get_partitioned_indices"]

_AXES_TO_BHSD = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3)}


@dataclass(frozen=True)
class QkvLayout:
    """packing: the parts of TE's layout name, such as `("sb3hd",)`, `("sbhd", "sb2hd")`, `("thd", "thd", "thd")`."""

    packing: tuple[str, ...]

    @classmethod
    def from_te(cls, layout: Any) -> "QkvLayout":
        """From a member or value of `NVTE_QKV_Layout`. Raises NotImplementedError for paged KV caches."""
        name = NVTE_QKV_Layout(int(layout)).name.removeprefix("NVTE_").lower()
        if name.startswith("paged_kv") or name.endswith("not_set"):
            raise NotImplementedError(f"fused attention with qkv_layout {name} has no CPU stand-in")
        return cls(tuple(name.split("_")))

    @property
    def q_format(self) -> str:
        return "".join(c for c in self.packing[0] if c.isalpha())

    @property
    def kv_format(self) -> str:
        return "".join(c for c in self.packing[-1] if c.isalpha())


def format_name(qkv_format: Any) -> str:
    """`sbhd`, `bshd`, `thd` or `bhsd` of a member or value of `NVTE_QKV_Format`."""
    return NVTE_QKV_Format(int(qkv_format)).name.removeprefix("NVTE_").lower()


def heads_first(tensor: torch.Tensor, tensor_format: str) -> torch.Tensor:
    """A view `[b, h, s, d]` of an attention tensor; of `thd`, `[1, h, t, d]`."""
    if tensor_format == "thd":
        return tensor.permute(1, 0, 2).unsqueeze(0)
    return tensor.permute(_AXES_TO_BHSD[tensor_format])


def shape_like(q: torch.Tensor, q_format: str, out_format: str, head_dim: int) -> tuple[int, ...]:
    """Shape of an output in `out_format` for queries q in `q_format` and value heads of `head_dim`."""
    if q_format == "thd" or out_format == "thd":
        if q_format != out_format:
            raise NotImplementedError(f"fused attention from {q_format} queries to {out_format} output")
        return (*q.shape[:-1], head_dim)
    b, h, s, _ = heads_first(q, q_format).shape
    sizes = {"b": b, "s": s, "h": h, "d": head_dim}
    return tuple(sizes[axis] for axis in out_format)


def empty_gradients(
    layout: QkvLayout, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialized dq, dk, dv, shaped like q, k, v; views of one tensor where the layout packs them, as TE's kernel
    does, so that concatenating them is free."""
    gradients: list[torch.Tensor] = []
    remaining = list(tensors)
    for part in layout.packing:
        count = next((int(c) for c in part if c.isdigit()), 1)
        gradients += _empty_part(part, remaining[:count], dtype)
        remaining = remaining[count:]
    dq, dk, dv = gradients
    return dq, dk, dv


def _empty_part(part: str, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    shape = tensors[0].shape
    if len(tensors) == 1:
        return [torch.empty(shape, dtype=dtype)]
    axis = next(i for i, c in enumerate(part) if c.isdigit())
    packed = torch.empty((*shape[:axis], len(tensors), *shape[axis:]), dtype=dtype)
    return list(packed.unbind(axis))


@dataclass(frozen=True)
class Segment:
    """One or more equally long sequences: batch and row slices of the views of q and of k, v."""

    q_batch: slice
    q_rows: slice
    kv_batch: slice
    kv_rows: slice

    def of_q(self, view: torch.Tensor) -> torch.Tensor:
        """This segment of a `[b, h, sq, ...]` view."""
        return view[self.q_batch, :, self.q_rows]

    def of_kv(self, view: torch.Tensor) -> torch.Tensor:
        """This segment of a `[b, hk, sk, d]` view."""
        return view[self.kv_batch, :, self.kv_rows]


_WHOLE = Segment(slice(None), slice(None), slice(None), slice(None))


def _placements(
    tensor_format: str, cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor | None
) -> list[tuple[slice, slice]]:
    """Batch and row slices of every sequence in a `heads_first` view."""
    ends = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in itertools.pairwise(ends)]
    if tensor_format != "thd":
        return [(slice(i, i + 1), slice(0, length)) for i, length in enumerate(lengths)]
    starts = (ends if cu_seqlens_padded is None else cu_seqlens_padded.tolist())[: len(lengths)]
    return [(slice(0, 1), slice(s, s + length)) for s, length in zip(starts, lengths, strict=True)]


def segments(
    layout: QkvLayout,
    padded: bool,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor],
    cu_seqlens_padded: tuple[torch.Tensor | None, torch.Tensor | None],
    max_seqlens: tuple[int, int],
) -> list[Segment]:
    """The sequences to attend within, in order; one segment for the whole batch if nothing is padded.

    cu_seqlens: cumulative lengths `[b + 1]` of q's and of k, v's sequences; cu_seqlens_padded: their starts in `thd`
    tensors, if other than cu_seqlens.
    """
    dense = "thd" not in (layout.q_format, layout.kv_format)
    if dense and not padded:
        return [_WHOLE]
    if dense and all(bool((ends.diff() == length).all()) for ends, length in zip(cu_seqlens, max_seqlens, strict=True)):
        return [_WHOLE]
    q_places = _placements(layout.q_format, cu_seqlens[0], cu_seqlens_padded[0])
    kv_places = _placements(layout.kv_format, cu_seqlens[1], cu_seqlens_padded[1])
    return [Segment(*q, *kv) for q, kv in zip(q_places, kv_places, strict=True)]


def _ranges(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """First token and end of every sequence."""
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

    Every sequence is cut into 2 * world_size equal chunks, of which rank r holds chunk r from the start and chunk r
    from the end. Raises ValueError for a sequence whose length is not divisible by that.
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


def copy_to_kv_cache(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_new_lens: Tensor,
    cu_cached_lens: Tensor,
    qkv_format: Any,
    b: int,
    max_ctx_len: int,  # noqa: ARG001 - the length that bshd and sbhd tensors have
    max_seq_len: int,
    max_pages_per_seq: int,
    is_non_paged: bool,
) -> None:
    """Append each sequence's new tokens to the caches.

    new_k, new_v: `[b, s, h, d]`, `[s, b, h, d]` or `[t, h, d]` by `qkv_format`; the first tokens of each sequence are
    new, as many as `cu_new_lens` (int32, cumulative, `[b + 1]` or longer) says. `cu_cached_lens`: lengths with the new
    tokens, likewise. k_cache, v_cache: `[pages, page size, h, d]`, written in place; a page holds `max_seq_len /
    max_pages_per_seq` tokens. page_table: int32, `max_pages_per_seq` pages per sequence. With `is_non_paged`, sequence
    i has page i, to which page `page_table[i]` is moved first.
    """
    new_lens, lens = cu_new_lens.diff()[:b].tolist(), cu_cached_lens.diff()[:b].tolist()
    pages = page_table.view(-1, max_pages_per_seq)[:b].long()
    if is_non_paged:
        _move_up(pages[:, 0].tolist(), [old - new for old, new in zip(lens, new_lens, strict=True)], k_cache, v_cache)
        pages = torch.arange(b).unsqueeze(1)
    page_size = max_seq_len // max_pages_per_seq
    starts = cu_new_lens.tolist()
    for index, (new, length) in enumerate(zip(new_lens, lens, strict=True)):
        places = torch.arange(length - new, length)
        at = (pages[index][places // page_size], places % page_size)
        for cache, tokens in ((k_cache, new_k), (v_cache, new_v)):
            cache[at] = _tokens_of(tokens, qkv_format, index, starts[index], new)


def _move_up(sources: list[int], lengths: list[int], *caches: Tensor) -> None:
    """Close the gaps that finished sequences left: page i gets the tokens of page `sources[i]`, `sources[i] >= i`."""
    for target, (source, length) in enumerate(zip(sources, lengths, strict=True)):
        if source != target:
            for cache in caches:
                cache[target, :length] = cache[source, :length].clone()


def _tokens_of(tokens: Tensor, qkv_format: Any, index: int, start: int, number: int) -> Tensor:
    kind = NVTE_QKV_Format(int(qkv_format))
    if kind == NVTE_QKV_Format.NVTE_THD:
        return tokens[start : start + number]
    if kind == NVTE_QKV_Format.NVTE_SBHD:
        return tokens[:number, index]
    if kind == NVTE_QKV_Format.NVTE_BSHD:
        return tokens[index, :number]
    raise NotImplementedError(f"copy_to_kv_cache for {kind.name} has no CPU stand-in")
