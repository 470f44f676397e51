"""Owns writing a checkpoint's tensors, of which each exists only while it is written.

One process does without a process group. Must not know models or Hugging Face.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_fp8.checkpoint.manifest import write_sums
from megatron_fp8.checkpoint.tensor_files import NewPiece, WrittenPiece, write_index, write_pieces
from megatron_fp8.hf.groups import Shape


def write_tensors(directory: Path, shapes: Mapping[str, Shape], value: Callable[[str], Tensor]) -> None:
    """Write FP32 tensors into an empty directory as a checkpoint's, a file each, and their sums.

    `value` is asked for each of them by name when it is written. Raises OSError where it cannot be.
    """
    written: list[WrittenPiece] = []
    for number, (name, shape) in enumerate(shapes.items()):
        tensor = value(name)
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != torch.float32:
            raise RuntimeError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not FP32 {list(shape)}")
        # A file each: the ranks that load share the files.
        piece = NewPiece(name, tuple(shape), (0,) * tensor.dim(), tensor)
        written += write_pieces(directory / f"__0_{number}.distcp", [piece])
        del tensor, piece
    write_index(directory, written)
    write_sums(directory, 0, sorted(path.name for path in directory.iterdir()))
