"""Compares two checkpoints tensor by tensor, whatever layouts wrote them, with a few pieces in memory at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from megatron_fp8.checkpoint.manifest import CheckpointError
from megatron_fp8.checkpoint.plain_index import IndexedTensor, Piece, read_plain_index
from megatron_fp8.checkpoint.tensor_files import overlap, read_piece, within

_PIECES_IN_MEMORY = 8


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor of two checkpoints differs.

    `kind`: `equal` bit for bit, `values`, `shape`, `dtype`, or the only side that has it, `first` or `second`.
    `max_abs`, `max_rel`: largest absolute difference, and relative to the first (infinite if that is 0; NaN if a value
    is). `num_different`: number of elements that differ.
    """

    name: str
    kind: str
    max_abs: float = 0.0
    max_rel: float = 0.0
    num_different: int = 0
    detail: str = ""


def differences(first: Path, second: Path, only: str = "") -> Iterator[TensorDifference]:
    """Compare every tensor of either checkpoint whose name contains `only`, by name.

    Raises CheckpointError for a corrupt file.
    """
    indices = read_plain_index(first), read_plain_index(second)
    for name in sorted(indices[0].keys() | indices[1].keys()):
        if only not in name:
            continue
        one, other = indices[0].get(name), indices[1].get(name)
        if one is None or other is None:
            yield TensorDifference(name, "second" if one is None else "first")
        elif one.shape != other.shape:
            yield TensorDifference(name, "shape", detail=f"{list(one.shape)} and {list(other.shape)}")
        elif one.dtype != other.dtype:
            yield TensorDifference(name, "dtype", detail=f"{one.dtype} and {other.dtype}")
        else:
            yield _compare(name, one, first, other, second)


def _compare(name: str, one: IndexedTensor, first: Path, other: IndexedTensor, second: Path) -> TensorDifference:
    max_abs, max_rel, num_different, num_compared = 0.0, 0.0, 0, 0
    read_first = _reader(first)
    for piece in other.pieces:
        values = read_piece(second, piece)
        for counterpart in one.pieces:
            spans = overlap(piece, counterpart)
            if spans is None:
                continue
            left, right = read_first(counterpart)[within(counterpart, spans)], values[within(piece, spans)]
            num_compared += left.numel()
            absolute, relative, number = _numbers(left, right)
            # Not max(), whose result with NaN depends on the order.
            max_abs, max_rel = _larger(max_abs, absolute), _larger(max_rel, relative)
            num_different += number
    if num_compared != one.num_elements:
        raise CheckpointError(f"{name}: the pieces have {num_compared:,} of {one.num_elements:,} elements in common")
    return TensorDifference(name, "values" if num_different else "equal", max_abs, max_rel, num_different)


def _reader(directory: Path) -> Callable[[Piece], Tensor]:
    @lru_cache(maxsize=_PIECES_IN_MEMORY)
    def read(piece: Piece) -> Tensor:
        return read_piece(directory, piece)

    return read


def _numbers(left: Tensor, right: Tensor) -> tuple[float, float, int]:
    """(largest absolute and relative difference, number of elements with different bits)."""
    different = _bits(left) != _bits(right)
    number = int(different.sum())
    if number == 0:
        return 0.0, 0.0, 0
    before, after = left[different].double(), right[different].double()
    absolute = (after - before).abs()
    # 0 and -0 differ only in their bits.
    relative = torch.where(absolute == 0, 0.0, absolute / before.abs())
    return float(absolute.max()), float(relative.max()), number


def _bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def _larger(one: float, other: float) -> float:
    return other if other != other or other > one else one
