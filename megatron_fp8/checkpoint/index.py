"""Owns reading the index of a checkpoint (torch's `.metadata`): which tensors there are, with shapes and dtypes.

torch writes it as a pickle, and unpickling runs whatever a file says. Here only the classes that an index is made of
can be unpickled; anything else is refused by name, before Megatron and torch read the same file. Must not know
parameters or runs.
"""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_fp8.checkpoint.manifest import CheckpointError

INDEX = ".metadata"
_DCP = "torch.distributed.checkpoint"
# All that an index consists of, beside torch's dtypes.
_CLASSES = frozenset(
    {
        ("torch", "Size"),
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


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Reader(pickle.Unpickler):
    """Unpickles an index, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _CLASSES:
            return super().find_class(module, name)
        raise CheckpointError(f"it would run {module}.{name}, which no index of tensors needs")


def read_index(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of the checkpoint in `directory`, by name.

    Raises CheckpointError when the index is missing, damaged, or holds anything but an index.
    """
    path = directory / INDEX
    try:
        metadata = _Reader(io.BytesIO(path.read_bytes())).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: {directory} is not a whole checkpoint") from None
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}): it is damaged") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} holds a {type(metadata).__name__}, not an index of tensors")
    return {
        name: StoredTensor(tuple(stored.size), stored.properties.dtype)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
