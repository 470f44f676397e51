"""Gathers and broadcasts Python objects, which torch pickles between the ranks of one job (`docs/security.md`).

A process without a process group is a job of one rank.
"""

from typing import TypeVar

import torch
import torch.distributed
from torch.distributed import ProcessGroup

T = TypeVar("T")


def all_gather(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Every rank's `value`, by rank of `group` (None: all ranks of the job). Collective over the group."""
    if not torch.distributed.is_initialized():
        return [value]
    values: list[T] = [value] * torch.distributed.get_world_size(group)
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value, group=group)
    return values


def broadcast(value: T, source: int = 0) -> T:
    """Rank `source`'s `value` on every rank of the job. Collective over all ranks."""
    values = [value]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(values, src=source)
    return values[0]
