"""Owns writing a checkpoint's tensors, of which each exists only while it is written.

Checkpoints are in torch's distributed format (Megatron's torch_dist); one process does without a process group. Must
not know models or Hugging Face.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from megatron_fp8.checkpoint.manifest import write_sums
from megatron_fp8.checkpoint.whole_tensors import one_process
from megatron_fp8.hf.groups import Shape

# What Megatron's loader reads beside the tensors: which format this is, and objects, of which there are none.
_MEGATRON_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def write_tensors(directory: Path, shapes: Mapping[str, Shape], value: Callable[[str], Tensor]) -> None:
    """Write FP32 tensors into an empty directory in Megatron's format, a file each, and their sums.

    `value` is asked for each of them by name when it is written. Raises OSError where it cannot be.
    """
    placeholders = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}
    # A file each: the ranks that load share the files. No copying ahead: that would hold two tensors.
    writer = _PathlessWriter(directory, single_file_per_rank=False, per_thread_copy_ahead=0, sync_files=False)
    with one_process(f"{directory} cannot be written", OSError):
        dcp.save(placeholders, storage_writer=writer, planner=_AskingPlanner(value), no_dist=True)
    (directory / "metadata.json").write_text(json.dumps(_MEGATRON_FORMAT), encoding="utf-8")
    torch.save({}, directory / "common.pt")
    write_sums(directory, 0, sorted(path.name for path in directory.iterdir()))


class _PathlessWriter(dcp.FileSystemWriter):
    """Leaves out of the index where it was written: a path there is an object that `read_index` refuses."""

    def storage_meta(self) -> None:
        return None


class _AskingPlanner(dcp.DefaultSavePlanner):
    """Takes each tensor from a function at the moment when it is written."""

    def __init__(self, value: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._value = value

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name = write_item.index.fqn
        tensor = self._value(name).contiguous()
        assert write_item.tensor_data is not None
        if tensor.shape != write_item.tensor_data.size or tensor.dtype != torch.float32:
            raise RuntimeError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not FP32 {write_item.tensor_data.size}")
        return tensor
