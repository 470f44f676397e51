"""Memory layouts of attention tensors: how each becomes `[b, h, s, d]`, and which slices are sequences.

Owns TE's layout names (`sbhd`, `bshd`, `thd`, `bhsd`, packed forms such as `sb3hd`). Must not know scores.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fp8.cpu.enums import NVTE_QKV_Format, NVTE_QKV_Layout

_AXES_TO_BHSD = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3)}


@dataclass(frozen=True)
class QkvLayout:
    """Formats of q and of k, v, and how a packed tensor interleaves them.

    packing: the parts of TE's layout name, such as `("sb3hd",)`, `("sbhd", "sb2hd")`, `("thd", "thd", "thd")`.
    """

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
    """Uninitialized dq, dk, dv of the shapes of q, k, v, views of one tensor where the layout packs them.

    Packed as TE's kernel packs them, so that joining them again is free.
    """
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
    """Rows of one or more equally long sequences: batch and sequence slices of q's and of k, v's view."""

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
    """The sequences to attend within, in order; one segment for the whole batch where nothing is padded.

    cu_seqlens: cumulative lengths `[b + 1]` of q's and of k, v's sequences; cu_seqlens_padded: where each
    starts in `thd` tensors, if not at cu_seqlens.
    """
    dense = "thd" not in (layout.q_format, layout.kv_format)
    if dense and not padded:
        return [_WHOLE]
    if dense and all(bool((ends.diff() == length).all()) for ends, length in zip(cu_seqlens, max_seqlens, strict=True)):
        return [_WHOLE]
    q_places = _placements(layout.q_format, cu_seqlens[0], cu_seqlens_padded[0])
    kv_places = _placements(layout.kv_format, cu_seqlens[1], cu_seqlens_padded[1])
    return [Segment(*q, *kv) for q, kv in zip(q_places, kv_places, strict=True)]
