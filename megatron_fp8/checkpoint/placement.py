"""Maps a rank's part of a parameter to boxes of the whole parameter, which no layout depends on.

A rank holds a tensor-parallel shard of a parameter, and of its optimizer state only a range of the shard's flat
elements (Megatron's distributed optimizer cuts its buffers anywhere). A flat range of a matrix is at most a piece of a
row, whole rows, and another piece of a row: boxes in the whole parameter, so that a checkpoint can be read under any
other layout.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_fp8.model.sharding import ParameterSharding


@dataclass(frozen=True)
class Box:
    """A box of the whole parameter; its elements are contiguous in the rank's flat shard, from `start` on."""

    start: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """One past its last element in the rank's flat shard."""
        return self.start + math.prod(self.shape)


def whole_box(shape: tuple[int, ...]) -> Box:
    """The box that covers a whole tensor."""
    return Box(0, (0,) * len(shape), shape)


@dataclass(frozen=True)
class Placement:
    """A tensor-parallel rank's shard of a parameter.

    `local_shape`: of the shard, one or two axes. `num_rows`: rows of the whole parameter without the padding of the
    vocabulary, which depends on the layout and is not saved (its rows are always 0).
    """

    sharding: ParameterSharding
    local_shape: tuple[int, ...]
    tp_rank: int
    tp_size: int
    num_rows: int | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, without padding."""
        shape = list(self.local_shape)
        if self.sharding.axis is not None:
            shape[self.sharding.axis] *= self.tp_size
        if self.num_rows is not None:
            shape[0] = self.num_rows
        return tuple(shape)

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """The boxes of the elements `start` to `stop` of the flat shard, in order."""
        row_size = 1 if len(self.local_shape) == 1 else self.local_shape[1]
        for first, last, whole_row in self._row_blocks():
            for piece in _pieces(max(start, first * row_size), min(stop, last * row_size), row_size):
                yield self._box(piece, row_size, whole_row - first)

    def _row_blocks(self) -> Iterator[tuple[int, int, int]]:
        """(first row, one past the last, number of the first in the whole parameter) of each run of rows."""
        rows = self.local_shape[0]
        if self.sharding.axis != 0:
            yield 0, rows, 0
            return
        part = rows // self.sharding.num_parts
        for index in range(self.sharding.num_parts):
            whole = (index * self.tp_size + self.tp_rank) * part
            last = (index + 1) * part
            if self.num_rows is not None:
                last = min(last, index * part + self.num_rows - whole)
            if last > index * part:
                yield index * part, last, whole

    def _box(self, piece: tuple[int, int], row_size: int, row_shift: int) -> Box:
        start, stop = piece
        row, column = divmod(start, row_size)
        if len(self.local_shape) == 1:
            return Box(start, (row + row_shift,), (stop - start,))
        left = self.tp_rank * row_size if self.sharding.axis == 1 else 0
        num_rows = max(1, (stop - start) // row_size)
        return Box(start, (row + row_shift, left + column), (num_rows, (stop - start) // num_rows))


def _pieces(start: int, stop: int, row_size: int) -> Iterator[tuple[int, int]]:
    """Split a flat range into a piece of a row, whole rows, and a piece of a row, as far as it has them."""
    while start < stop:
        if start % row_size:
            end = min(stop, start - start % row_size + row_size)
        else:
            end = max(stop - stop % row_size, start) if stop - start >= row_size else stop
        yield start, end
        start = end
