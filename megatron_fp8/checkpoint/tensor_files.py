"""Reads and writes the tensors of a checkpoint in torch's distributed format: pieces in files, and their index.

A piece is what `torch.save` writes for a box of a tensor, and is read with `weights_only=True`. The index is a pickle,
which torch would run: only `plain_index` reads it. One process, no collectives.
"""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_fp8.checkpoint.manifest import CheckpointError
from megatron_fp8.checkpoint.parameter_boxes import Box, whole_box
from megatron_fp8.checkpoint.plain_index import INDEX, PRECISION, Piece, read_plain_index


@dataclass(frozen=True)
class NewPiece:
    """A box of the tensor `key`, at `offset` in its `whole_shape`, to be written; values on the host."""

    key: str
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class WrittenPiece:
    """A written piece, and its tensor: name, whole shape, torch's name of the dtype."""

    key: str
    whole_shape: tuple[int, ...]
    dtype: str
    piece: Piece


def write_pieces(path: Path, pieces: Iterable[NewPiece]) -> list[WrittenPiece]:
    """Write pieces to a file one after another, taking each only when the one before is written. Raises OSError."""
    written = []
    with path.open("wb") as file:
        for new in pieces:
            start = file.tell()
            try:
                torch.save(_compact(new.values), file)
            except RuntimeError as error:
                raise _system_error(error) from error
            shape, dtype = tuple(new.values.shape), str(new.values.dtype).removeprefix("torch.")
            piece = Piece(new.offset, shape, path.name, start, file.tell() - start)
            written.append(WrittenPiece(new.key, new.whole_shape, dtype, piece))
    return written


def read_piece(directory: Path, piece: Piece) -> Tensor:
    """One piece, on the CPU. Raises CheckpointError if the file does not contain it."""
    path = directory / piece.file
    try:
        with path.open("rb") as file:
            # As torch's own reader: no copy of the bytes.
            part = cast(BinaryIO, _create_file_view(file, piece.start, piece.num_bytes))
            tensor = torch.load(part, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read at byte {piece.start:,}: {error}") from error
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != piece.shape:
        raise CheckpointError(f"{path} has no tensor of shape {list(piece.shape)} at byte {piece.start:,}")
    return tensor


def overlap(one: Piece | Box, other: Piece | Box) -> tuple[tuple[int, int], ...] | None:
    """The intersection of two boxes of a tensor as (start, stop) along every axis; None if it is empty."""
    spans = tuple(
        (max(a, b), min(a + n, b + m))
        for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )
    return spans if all(start < stop for start, stop in spans) else None


def within(box: Piece | Box, spans: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    """The slices of a box that `spans` of the whole tensor cover."""
    return tuple(slice(start - offset, stop - offset) for (start, stop), offset in zip(spans, box.offset, strict=True))


def write_index(directory: Path, written: Iterable[WrittenPiece]) -> None:
    """Write the index of these pieces. Raises CheckpointError if they leave elements of a tensor out.

    `torch.distributed.checkpoint.load` reads such a checkpoint.
    """
    tensors: dict[str, metadata.TensorStorageMetadata] = {}
    places: dict[metadata.MetadataIndex, _StorageInfo] = {}
    for new in sorted(written, key=lambda new: (new.key, new.piece.offset)):
        tensor = tensors.setdefault(
            new.key,
            metadata.TensorStorageMetadata(
                metadata.TensorProperties(dtype=getattr(torch, new.dtype)), torch.Size(new.whole_shape), []
            ),
        )
        piece = new.piece
        place = metadata.MetadataIndex(new.key, torch.Size(piece.offset), len(tensor.chunks))
        tensor.chunks.append(metadata.ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)))
        places[place] = _StorageInfo(piece.file, piece.start, piece.num_bytes)
    for name, tensor in tensors.items():
        num_written = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if num_written != tensor.size.numel():
            raise CheckpointError(
                f"{directory}: the ranks wrote {num_written:,} of the {tensor.size.numel():,} elements of {name}"
            )
    content = pickle.dumps(metadata.Metadata(state_dict_metadata=dict(tensors), storage_data=places))
    (directory / INDEX).write_bytes(content)


class TensorReader:
    """Reads whole tensors of a checkpoint, whatever layout wrote it. Raises CheckpointError for a corrupt file."""

    def __init__(self, checkpoint: Path) -> None:
        self.index = read_plain_index(checkpoint)
        self._checkpoint = checkpoint

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        stored = self.index[name]
        if len(stored.pieces) == 1 and stored.pieces[0].shape == stored.shape:
            return read_piece(self._checkpoint, stored.pieces[0])
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="cpu")
        self.fill(name, tensor.view(-1), [whole_box(stored.shape)], 0)
        return tensor

    def fill(self, name: str, values: Tensor, boxes: Sequence[Box], first: int) -> None:
        """Read into boxes of flat `values`, whose first element is number `first` of the shard that the boxes count in.

        Reads only the pieces that are needed, each once. Raises CheckpointError if the pieces leave elements out.
        """
        views = [(box, values[box.start - first : box.stop - first].view(box.shape)) for box in boxes]
        num_filled = 0
        for piece in self.index[name].pieces:
            shared = [(box, view, spans) for box, view in views if (spans := overlap(piece, box)) is not None]
            if not shared:
                continue
            content = read_piece(self._checkpoint, piece)
            for box, view, spans in shared:
                part = content[within(piece, spans)]
                view[within(box, spans)].copy_(part)
                num_filled += part.numel()
        wanted = sum(view.numel() for _, view in views)
        if num_filled != wanted:
            raise CheckpointError(
                f"{self._checkpoint}: the pieces of {name} have {num_filled:,} of {wanted:,} elements"
            )


def scaling_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The FP8 scaling state among a checkpoint's tensors, as `PrecisionManager.load_state_dict` takes it."""
    state = {name.removeprefix(PRECISION): tensor for name, tensor in tensors.items() if name.startswith(PRECISION)}
    # Scalars were saved with the shape [1].
    return {name: tensor if name.startswith("layers.") else tensor.reshape(()) for name, tensor in state.items()}


def _compact(tensor: Tensor) -> Tensor:
    """The tensor with a storage of its own size, because torch writes the whole storage."""
    compact = tensor.detach().contiguous()
    is_whole = compact.untyped_storage().nbytes() == compact.numel() * compact.element_size()
    return compact if is_whole else compact.clone()


def _system_error(error: Exception) -> Exception:
    """The OSError behind a RuntimeError of torch about positions in the file."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError):
            return chain
        chain = chain.__cause__ or chain.__context__
    return error
