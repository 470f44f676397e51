"""Owns the index of a checkpoint (torch's `.metadata`) in torch's terms: made of what the ranks wrote, and read.

It is a pickle, and reading it with torch would run whatever it says: `plain_index` reads it, here and everywhere. Must
not know parameters or runs.
"""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fp8.checkpoint.manifest import CheckpointError
from megatron_fp8.checkpoint.pieces import WrittenPiece
from megatron_fp8.checkpoint.plain_index import INDEX, IndexedTensor, read_plain_index


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    indexed: IndexedTensor


def read_index(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of the checkpoint in `directory`, by name. Raises CheckpointError as `read_plain_index` does."""
    return {
        name: StoredTensor(tensor.shape, getattr(torch, tensor.dtype), tensor)
        for name, tensor in read_plain_index(directory).items()
    }


def write_index(directory: Path, written: Iterable[WrittenPiece]) -> None:
    """Write the index of these pieces, which make up whole tensors. Raises CheckpointError where one lacks elements.

    Plain `torch.distributed.checkpoint.load` reads such a checkpoint.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for new in sorted(written, key=lambda new: (new.key, new.piece.offset)):
        tensor = tensors.setdefault(
            new.key,
            TensorStorageMetadata(TensorProperties(dtype=getattr(torch, new.dtype)), torch.Size(new.whole_shape), []),
        )
        piece = new.piece
        place = MetadataIndex(new.key, torch.Size(piece.offset), len(tensor.chunks))
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)))
        places[place] = _StorageInfo(piece.file, piece.start, piece.num_bytes)
    for name, tensor in tensors.items():
        num_written = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if num_written != tensor.size.numel():
            raise CheckpointError(
                f"{directory}: the ranks wrote {num_written:,} of the {tensor.size.numel():,} elements of {name}"
            )
    content = pickle.dumps(Metadata(state_dict_metadata=dict(tensors), storage_data=places))
    (directory / INDEX).write_bytes(content)
