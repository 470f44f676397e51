"""Owns bringing a group's tensors from our form to Hugging Face's and back. Values are moved, never changed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp8.hf.groups import TensorGroup


def to_theirs(group: TensorGroup, ours: Sequence[Tensor]) -> list[Tensor]:
    """Hugging Face's tensors of a group from ours, in the order of `group.theirs`."""
    parts = list(ours) if len(ours) == len(group.parts) else _unstack(group, ours[0], group.num_blocks)
    theirs = parts if len(group.theirs) == len(parts) else [torch.cat(parts)]
    return [tensor.t() for tensor in theirs] if group.transposed else theirs


def to_ours(group: TensorGroup, theirs: Sequence[Tensor]) -> list[Tensor]:
    """Our tensors of a group from Hugging Face's, in the order of `group.ours`."""
    tensors = [tensor.t() for tensor in theirs] if group.transposed else list(theirs)
    parts = tensors if len(tensors) == len(group.parts) else _unstack(group, tensors[0], 1)
    return parts if len(group.ours) == len(parts) else [_stack(parts, group.num_blocks)]


def _unstack(group: TensorGroup, stacked: Tensor, num_blocks: int) -> list[Tensor]:
    blocks = stacked.reshape(num_blocks, -1, *stacked.shape[1:])
    rows = [part[0] // num_blocks for part in group.parts]
    return [part.reshape(shape) for part, shape in zip(blocks.split(rows, dim=1), group.parts, strict=True)]


def _stack(parts: Sequence[Tensor], num_blocks: int) -> Tensor:
    blocks = [part.reshape(num_blocks, -1, *part.shape[1:]) for part in parts]
    return torch.cat(blocks, dim=1).flatten(0, 1)
