"""Reads the index of a checkpoint (torch's `.metadata`) without torch: names, shapes, dtypes, positions of pieces.

The index is a pickle. No class that it names is imported, let alone called: plain records stand in for the classes of
an index, and any other name is refused.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fp8.checkpoint.manifest import CheckpointError, is_file_name
from megatron_fp8.config.paths import open_file

# A tensor's name is free of the layout: one of these, then a parameter, a scaling state, or a random stream and its
# rank.
MASTER, WEIGHT = "master.", "weight."
FP8_WEIGHT, FP8_WEIGHT_SCALE = "fp8_weights.", "fp8_weight_scales."
PRECISION, STREAM = "precision.", "rng."
INDEX = ".metadata"
_DCP = "torch.distributed.checkpoint"
# The classes of an index, besides `torch.Size` and torch's dtypes. Listed one by one: a dotted name in one of these
# modules could mean anything that the module has imported.
_CLASSES = frozenset(
    {
        ("torch.serialization", "_get_layout"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        *((f"{_DCP}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        *(
            (f"{_DCP}.metadata", name)
            for name in (
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "BytesStorageMetadata",
                "TensorStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)
_DTYPE_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the bytes of `file` that hold it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class IndexedTensor:
    """A tensor of a checkpoint: whole shape, torch's name of its dtype, pieces."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, without the overhead of the file."""
        return self.num_elements * _DTYPE_BYTES[self.dtype]


def read_plain_index(directory: Path) -> dict[str, IndexedTensor]:
    """The tensors of a checkpoint by name, in order.

    Raises CheckpointError if the index is missing, corrupt, or contains anything but an index.
    """
    path = directory / INDEX
    try:
        with open_file(path) as file:
            index = _Reader(io.BytesIO(file.read())).load()
        stored = {
            # Entries that are not tensors have no offset.
            (key.fqn, tuple(getattr(key, "offset", None) or ())): _place(information)
            for key, information in index.storage_data.items()
        }
        tensors = {
            name: _tensor(name, tensor, stored)
            for name, tensor in index.state_dict_metadata.items()
            if hasattr(tensor, "chunks")
        }
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: {directory} is not a checkpoint, or an incomplete one") from None
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}): it is corrupt") from error
    return dict(sorted(tensors.items()))


class _Record:
    """Stands in for any class of an index; keeps the pickled state."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.state = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, Mapping):
            self.__dict__.update(state)


class _Reader(pickle.Unpickler):
    """Unpickles an index into records, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in _DTYPE_BYTES:
            return name
        if (module, name) in _CLASSES:
            return _Record
        raise CheckpointError(f"it would run {module}.{name}, which an index of tensors does not need")


def _place(information: Any) -> tuple[str, int, int]:
    if not is_file_name(information.relative_path):
        raise CheckpointError(f"it names the file {information.relative_path!r}, which is outside the checkpoint")
    return information.relative_path, information.offset, information.length


def _tensor(
    name: str, tensor: Any, stored: Mapping[tuple[str, tuple[int, ...]], tuple[str, int, int]]
) -> IndexedTensor:
    pieces = tuple(
        Piece(tuple(chunk.offsets), tuple(chunk.sizes), *stored[name, tuple(chunk.offsets)]) for chunk in tensor.chunks
    )
    # The properties are pickled as a tuple that begins with the dtype.
    return IndexedTensor(tuple(tensor.size), tensor.properties.state[0], pieces)
