"""Owns the index of a checkpoint (torch's `.metadata`) as loading needs it: which tensors there are, in torch's terms.

It is asked for before Megatron and torch read the same file: they unpickle it, which runs whatever it says, and
`plain_index` refuses an index that names anything but what an index consists of. Must not know parameters or runs.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_fp8.checkpoint.plain_index import read_plain_index


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def read_index(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of the checkpoint in `directory`, by name. Raises CheckpointError as `read_plain_index` does."""
    return {
        name: StoredTensor(tensor.shape, getattr(torch, tensor.dtype))
        for name, tensor in read_plain_index(directory).items()
    }
