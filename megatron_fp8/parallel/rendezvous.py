"""Owns the store through which the ranks of this start of a job speak, apart from what earlier starts have left in it.

torchrun keeps one store over all its restarts, and torch writes the same keys in each. A rank that reads early would
get what a rank of the start before had written (gloo's addresses, NCCL's id, a verdict of the watchdog), and wait for
a process that is gone. Counts of restarts do not tell starts apart: each node has its own. So rank 0 draws a name for
this start and tells it to who asks under a name that nobody has used before.
"""

import time
import uuid
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store

_SECONDS_BETWEEN_LOOKS = 0.02
_MOST_NAMED = 16


class ConnectError(RuntimeError):
    """The ranks did not find or did not reach each other."""


def store_of_this_start(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """A part of `store` that only the ranks of this start use. Every rank calls this; rank 0 waits for all.

    Raises ConnectError after `timeout`, on rank 0 with the ranks that did not come.
    """
    name = _tell_all(store, world_size, timeout) if rank == 0 else _ask(store, rank, timeout)
    own = PrefixStore(f"start {name}", store)
    own.set_timeout(timeout)
    return own


def _ask(store: Store, rank: int, timeout: timedelta) -> str:
    question = uuid.uuid4().hex
    store.set_timeout(timeout)
    store.set(f"question of rank {rank}", question)
    try:
        name = store.get(f"answer to {question}").decode()
    except DistStoreError as error:
        raise ConnectError(f"rank 0 did not come within {timeout.total_seconds():g} s: {error}") from error
    store.set(f"{name}: rank {rank} has come", "")
    return name


def _tell_all(store: Store, world_size: int, timeout: timedelta) -> str:
    name = uuid.uuid4().hex
    ends = time.monotonic() + timeout.total_seconds()
    answered: dict[int, bytes] = {}
    missing = list(range(1, world_size))
    while missing:
        for rank in missing:
            key = f"question of rank {rank}"
            question = store.get(key) if store.check([key]) else None
            # At first it may be that of an earlier start, which nobody waits for any more.
            if question is not None and question != answered.get(rank):
                store.set(f"answer to {question.decode()}", name)
                answered[rank] = question
        missing = [rank for rank in missing if not store.check([f"{name}: rank {rank} has come"])]
        if missing and time.monotonic() > ends:
            shown = ", ".join(map(str, missing[:_MOST_NAMED])) + (" and more" if len(missing) > _MOST_NAMED else "")
            raise ConnectError(f"{len(missing)} of {world_size} ranks did not come within {timeout}: {shown}")
        if missing:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    return name
