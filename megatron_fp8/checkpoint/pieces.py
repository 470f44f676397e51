"""Owns the pieces of tensors in a checkpoint's files: writing one after another into a file, reading one, finding those
that a box needs.

A piece is what `torch.save` writes of a tensor; this is torch's distributed format, which `index` describes. Read with
`weights_only=True`. One process, no collectives; must not know what tensors mean.
"""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_fp8.checkpoint.manifest import CheckpointError
from megatron_fp8.checkpoint.placement import Box
from megatron_fp8.checkpoint.plain_index import IndexedTensor, Piece


@dataclass(frozen=True)
class NewPiece:
    """A box of the tensor `key`, at `offset` in its `whole_shape`, that is to be written: values on the host."""

    key: str
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class WrittenPiece:
    """A piece that was written, and the tensor that it is of: its name, whole shape, and torch's name of its dtype."""

    key: str
    whole_shape: tuple[int, ...]
    dtype: str
    piece: Piece


def write_pieces(path: Path, pieces: Iterable[NewPiece]) -> list[WrittenPiece]:
    """Write pieces into a file, in order; where each lies. Each is asked for when the one before is written.

    Raises OSError as the system does.
    """
    written = []
    with path.open("wb") as file:
        for new in pieces:
            start = file.tell()
            try:
                torch.save(_alone(new.values), file)
            except RuntimeError as error:
                raise _system_error(error) from error
            shape, dtype = tuple(new.values.shape), str(new.values.dtype).removeprefix("torch.")
            piece = Piece(new.offset, shape, path.name, start, file.tell() - start)
            written.append(WrittenPiece(new.key, new.whole_shape, dtype, piece))
    return written


def read_piece(directory: Path, piece: Piece) -> Tensor:
    """One piece, on the CPU. Raises CheckpointError where the file does not hold it."""
    path = directory / piece.file
    try:
        with path.open("rb", buffering=0) as file:
            part = io.BufferedReader(_PartOfFile(file, piece.start, piece.num_bytes))
            tensor = torch.load(part, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read at byte {piece.start:,}: {error}") from error
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != piece.shape:
        raise CheckpointError(f"{path} does not hold a tensor of shape {list(piece.shape)} at byte {piece.start:,}")
    return tensor


def fill(directory: Path, name: str, stored: IndexedTensor, values: Tensor, boxes: Sequence[Box], first: int) -> None:
    """Put what a checkpoint holds of the tensor `name` into boxes of flat `values`, whose first element is number
    `first` of the shard that the boxes count in; only pieces that are needed are read, each once.

    Raises CheckpointError for a file that cannot be read, and where the pieces leave elements out.
    """
    views = [(box, values[box.start - first : box.stop - first].view(box.shape)) for box in boxes]
    num_filled = 0
    for piece in stored.pieces:
        shared = [(box, view, spans) for box, view in views if (spans := overlap(piece, box)) is not None]
        if not shared:
            continue
        content = read_piece(directory, piece)
        for box, view, spans in shared:
            part = content[within(piece, spans)]
            view[within(box, spans)].copy_(part)
            num_filled += part.numel()
    wanted = sum(view.numel() for _, view in views)
    if num_filled != wanted:
        raise CheckpointError(f"{directory}: the pieces of {name} hold {num_filled:,} of {wanted:,} elements")


def overlap(one: Piece | Box, other: Piece | Box) -> tuple[tuple[int, int], ...] | None:
    """(first, one past the last) along every axis of what two boxes of a tensor share; None: nothing."""
    spans = tuple(
        (max(a, b), min(a + n, b + m))
        for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )
    return spans if all(start < stop for start, stop in spans) else None


def within(box: Piece | Box, spans: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    """Where `spans` of the whole tensor lie in a box of it."""
    return tuple(slice(start - offset, stop - offset) for (start, stop), offset in zip(spans, box.offset, strict=True))


def _alone(tensor: Tensor) -> Tensor:
    """The tensor as the whole of its storage, which torch would write with it."""
    compact = tensor.detach().contiguous()
    is_whole = compact.untyped_storage().nbytes() == compact.numel() * compact.element_size()
    return compact if is_whole else compact.clone()


def _system_error(error: Exception) -> Exception:
    """What the system said, which torch covers with a complaint about positions in the file."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError):
            return chain
        chain = chain.__cause__ or chain.__context__
    return error


class _PartOfFile(io.RawIOBase):
    """The bytes `start` to `start + num_bytes` of a file as a file of its own: a piece is read without a copy of it."""

    def __init__(self, file: io.FileIO, start: int, num_bytes: int) -> None:
        self._file = file
        self._start = start
        self._num_bytes = num_bytes
        self.seek(0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._num_bytes}[whence]
        self._file.seek(self._start + base + offset)
        return base + offset

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        left = max(0, self._num_bytes - self.tell())
        return self._file.readinto(memoryview(buffer)[:left]) or 0
