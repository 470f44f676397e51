"""Owns the way by which the ranks' watchdogs speak: keys of the store that the process group was started through.

Not a process group: what hangs is one of those. A connection of its own, since a store's client does one thing at a
time and the program may be waiting with the other one. Must not know what a message means.
"""

from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import PrefixStore, Store

_NO_VERDICT = ""


class HangBoard:
    """Messages of `world_size` ranks and one verdict. Raises RuntimeError and its like where the store has gone."""

    def __init__(self, store: Store, world_size: int, timeout_seconds: float) -> None:
        own = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        own.set_timeout(timedelta(seconds=timeout_seconds))
        self._store = PrefixStore("watchdog", own)
        self._world_size = world_size

    def post(self, rank: int, message: str) -> None:
        """Replace what a rank says."""
        self._store.set(f"rank {rank}", message)

    def messages(self) -> Mapping[int, str]:
        """What every rank says that has spoken yet."""
        keys = {rank: f"rank {rank}" for rank in range(self._world_size)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def propose(self, verdict: str) -> str:
        """Make this the verdict, unless there is one already; the one that holds."""
        return self._store.compare_set("verdict", _NO_VERDICT, verdict).decode()

    def verdict(self) -> str | None:
        """The verdict, if there is one."""
        return self._store.get("verdict").decode() if self._store.check(["verdict"]) else None
