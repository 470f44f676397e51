"""Owns what the doctor takes from the process's environment, and gives to the processes that it starts."""

from __future__ import annotations

import os


def launched() -> tuple[int, int] | None:
    """(rank, number of ranks) that torchrun gave this process; None without it.

    RANK alone says nothing: Kubernetes' operators number pods by it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def child_environment(local_rank: int | None = None, num_ranks: int = 1) -> dict[str, str]:
    """This process's environment; with `local_rank` that of a rank of a job of this machine alone."""
    if local_rank is None:
        return dict(os.environ)
    rank = {"RANK": str(local_rank), "LOCAL_RANK": str(local_rank)}
    return {**os.environ, **rank, "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
