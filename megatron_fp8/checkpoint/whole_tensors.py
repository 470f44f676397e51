"""Owns reading single tensors of a checkpoint, whole, whatever layout wrote them.

Every process reads for itself: no process group is needed, and none is asked. Must not know models.
"""

from pathlib import Path

import torch
from torch import Tensor

from megatron_fp8.checkpoint.index import read_index
from megatron_fp8.checkpoint.pieces import fill, read_piece
from megatron_fp8.checkpoint.placement import whole_box


class TensorReader:
    """Reads tensors of one checkpoint. Raises CheckpointError for a damaged file, or an index that holds code."""

    def __init__(self, checkpoint: Path) -> None:
        self.index = read_index(checkpoint)
        self._checkpoint = checkpoint

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        stored = self.index[name]
        pieces = stored.indexed.pieces
        if len(pieces) == 1 and pieces[0].shape == stored.shape:
            return read_piece(self._checkpoint, pieces[0])
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        fill(self._checkpoint, name, stored.indexed, tensor.view(-1), [whole_box(stored.shape)], 0)
        return tensor
