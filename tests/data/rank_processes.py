"""Runs a function on several real gloo processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing


def run_on_ranks(function: Callable[..., Any], world_size: int, directory: Path, *arguments: Any) -> list[Any]:
    """`function(rank, *arguments)` in `world_size` processes of one gloo group; the results by rank."""
    torch.multiprocessing.spawn(
        _run, args=(function, world_size, str(directory), arguments), nprocs=world_size, join=True
    )
    return [pickle.loads((directory / f"result{rank}").read_bytes()) for rank in range(world_size)]


def _run(rank: int, function: Callable[..., Any], world_size: int, directory: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    result = function(rank, *arguments)
    (Path(directory) / f"result{rank}").write_bytes(pickle.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
