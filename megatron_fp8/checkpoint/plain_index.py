"""Owns reading the index of a checkpoint (torch's `.metadata`) without torch: names, shapes, dtypes, where pieces lie.

The index is a pickle. No class that it names is imported, let alone called: records of attributes stand in for those
that an index consists of, and anything else is refused. Imports no torch; must not know what tensors mean.
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

INDEX = ".metadata"
_DCP = "torch.distributed.checkpoint"
# All that an index consists of, beside `torch.Size` and torch's dtypes. Named one by one: a dotted name in one of these
# modules could mean whatever the module has imported.
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
    """A box of a tensor, at `offset` with `shape`, and the bytes of `file` that hold it: `start` and their number."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class IndexedTensor:
    """A tensor of a checkpoint: its whole shape, torch's name of its dtype, its pieces."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, without what the file adds to them."""
        return self.num_elements * _DTYPE_BYTES[self.dtype]


def read_plain_index(directory: Path) -> dict[str, IndexedTensor]:
    """The tensors of the checkpoint in `directory` by name, in order.

    Raises CheckpointError when the index is missing, damaged, or holds anything but an index.
    """
    path = directory / INDEX
    try:
        with open_file(path) as file:
            index = _Reader(io.BytesIO(file.read())).load()
        stored = {
            # What is no tensor has no offset.
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
        raise CheckpointError(f"{path} does not exist: {directory} is not a whole checkpoint") from None
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}): it is damaged") from error
    return dict(sorted(tensors.items()))


class _Record:
    """Stands in for any class of an index; keeps what was pickled."""

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
        raise CheckpointError(f"it would run {module}.{name}, which no index of tensors needs")


def _place(information: Any) -> tuple[str, int, int]:
    if not is_file_name(information.relative_path):
        raise CheckpointError(f"it names the file {information.relative_path!r}, which is outside of its directory")
    return information.relative_path, information.offset, information.length


def _tensor(
    name: str, tensor: Any, stored: Mapping[tuple[str, tuple[int, ...]], tuple[str, int, int]]
) -> IndexedTensor:
    pieces = tuple(
        Piece(tuple(chunk.offsets), tuple(chunk.sizes), *stored[name, tuple(chunk.offsets)]) for chunk in tensor.chunks
    )
    # The properties are pickled as a tuple that begins with the dtype.
    return IndexedTensor(tuple(tensor.size), tensor.properties.state[0], pieces)
