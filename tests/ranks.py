"""Runs a test's function on several real ranks: processes of one group, NCCL's in the stand-in, met through a file.

Ranks are forked from a server that has Transformer Engine and Megatron Core imported already, so that starting four
of them costs tenths of a second. A rank that raises ends the others; the test fails with that rank's traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.ranks_preload"])


class RankError(AssertionError):
    """A rank failed; the text is its traceback."""


def run_on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 240) -> list:
    """Call `function(*arguments)` on every rank of a new world; returns what the ranks returned, by rank."""
    with tempfile.TemporaryDirectory() as directory:
        processes, pipes = [], []
        for rank in range(world_size):
            receiver, sender = _SERVER.Pipe(duplex=False)
            # Not a daemon: those may not start the processes that write checkpoints.
            process = _SERVER.Process(
                target=_rank_main, args=(sender, rank, world_size, directory, function, arguments)
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            return _collect(pipes, time.monotonic() + timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list, deadline: float) -> list:
    results: dict[int, Any] = {}
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} did not finish in time")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                failed, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} ended without a result") from None
            if failed:
                raise RankError(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _rank_main(
    sender: Any, rank: int, world_size: int, directory: str, function: Callable[..., Any], arguments: tuple
) -> None:
    import torch.distributed

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    torch.distributed.init_process_group(
        "nccl",
        store=torch.distributed.FileStore(str(Path(directory) / "rendezvous"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    try:
        answer = (False, function(*arguments))
    except BaseException:  # noqa: BLE001 - reported to the test, whatever it is
        answer = (True, traceback.format_exc())
    # Not `send`, which would pass tensors as handles of this process, which ends.
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    # Without Python's shutdown: a rank that failed must not wait for the others.
    os._exit(0)
