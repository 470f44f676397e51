"""Owns reading single tensors of a checkpoint, whole, whatever layout wrote them.

Checkpoints are in torch's distributed format (Megatron's torch_dist). Every process reads for itself: no process group
is needed, and none is asked. Must not know models.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fp8.checkpoint.index import read_index
from megatron_fp8.checkpoint.manifest import CheckpointError


class TensorReader:
    """Reads tensors of one checkpoint. Raises CheckpointError for a damaged file, or an index that holds code."""

    def __init__(self, checkpoint: Path) -> None:
        self.index = read_index(checkpoint)
        self._storage = _RememberingReader(checkpoint)

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        stored = self.index[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        with one_process(f"{name} cannot be read from {self._storage.checkpoint_id}", CheckpointError):
            dcp.load({name: tensor}, storage_reader=self._storage, no_dist=True)
        return tensor


class _RememberingReader(dcp.FileSystemReader):
    """Reads the index once, not for every tensor."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


@contextmanager
def one_process(failed: str, error_type: type[Exception]) -> Iterator[None]:
    """Without torch's remark that there is no process group, which is meant; its errors as `error_type`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            causes = "; ".join(str(cause) for cause, _ in error.failures.values())
            raise error_type(f"{failed}: {causes}") from error
