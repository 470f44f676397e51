"""Owns the start of the process group: who this rank is, and how ranks find each other.

Reads what `torchrun` puts into the environment. Must not know models or formats.
"""

import os
from datetime import timedelta

import torch
import torch.distributed


def world_size() -> int:
    """Ranks of the job as the launcher says, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def global_rank() -> int:
    """This process's rank as the launcher says, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def init_process_group(backend: str, timeout_minutes: float) -> None:
    """Connect the ranks; `timeout_minutes` bounds the start and every collective.

    Without a launcher the process is a world of one and needs neither address nor port.
    """
    timeout = timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:
        torch.distributed.init_process_group(backend, timeout=timeout)
        return
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
