"""Finds ranks of one communicator that call different collectives, or the same in different order.

Under NCCL such ranks wait for ever or mix up their data, and so they do under gloo. Here each rank says what its n-th
call is in the job's store before it makes it: the first to come writes, the others compare. That costs a call one trip
to the store and never waits for another rank, so what NCCL lets overlap still does. (torch's own wrapper,
`TORCH_DISTRIBUTED_DEBUG=DETAIL`, makes every rank wait for all others at each call, and looks at neither messages
between two ranks nor groups of collectives.) Must not know which calls NCCL refuses (`nccl_rules`).
"""

from __future__ import annotations

import collections
import itertools
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

# Calls that an error names, and calls after which a call is no longer kept in the store: no rank is that far behind.
_NAMED, _KEPT = 6, 512


class CollectiveOrder:
    """What this rank has called so far, by communicator. `starts` tells process groups of one process apart."""

    def __init__(self) -> None:
        self._starts = 0
        self._forget()

    def _forget(self) -> None:
        self._counts: dict[str, int] = collections.defaultdict(int)
        self._calls: dict[str, collections.deque[str]] = collections.defaultdict(
            lambda: collections.deque(maxlen=_NAMED)
        )
        self._mine: dict[str, collections.deque[int]] = collections.defaultdict(collections.deque)

    def start(self) -> None:
        """The default process group was made anew: all communicators begin at their first call."""
        self._starts += 1
        self._forget()

    def collective(self, group: Any, call: str) -> None:
        """This rank is about to make `call`, which all ranks of `group` must make now. Raises RuntimeError."""
        self._agree(group, "", "collective", call)

    def message(self, group: Any, source: int, destination: int, call: str, in_batch: bool) -> None:
        """This rank is about to send or receive the message `call` from `source` to `destination`, ranks of `group`.

        The two ranks' messages form one sequence, as they share a stream, or in a batch one for each direction.
        """
        low, high = sorted((source, destination))
        call = f"{call} from {source} to {destination}"
        if in_batch:
            self._agree(group, f" batched {source}>{destination}", "batched message", call)
        else:
            self._agree(group, f" {low}-{high}", "message", call)

    def _agree(self, group: Any, channel: str, kind: str, call: str) -> None:
        name = f"{group.group_name}{channel}"
        number = self._counts[name]
        self._counts[name] += 1
        store, prefix = distributed_c10d._get_default_store(), f"nccl/{self._starts}/{name}/"
        mine = f"rank {torch.distributed.get_rank()}: {call}"
        first = store.compare_set(f"{prefix}{number}", "", mine).decode()
        rank, _, theirs = first.partition(": ")
        if theirs != call:
            later = "".join(f"; then {following}" for following in self._next(store, prefix, number, rank))
            raise RuntimeError(
                f"ranks of one communicator differ in {kind} {number + 1} of process group {_described(group)}: NCCL"
                f" would wait for ever or mix up data\n    {mine}\n    {first}{later}\n"
                f"    what both called before, at most {_NAMED}: {'; '.join(self._calls[name]) or 'nothing'}"
            )
        self._calls[name].append(call)
        if first == mine:
            self._tidy(store, prefix, name, number)

    def _tidy(self, store: Any, prefix: str, name: str, number: int) -> None:
        written = self._mine[name]
        written.append(number)
        while written[0] <= number - _KEPT:
            store.delete_key(f"{prefix}{written.popleft()}")

    @staticmethod
    def _next(store: Any, prefix: str, number: int, rank: str) -> list[str]:
        """What the rank that came first has called since, as far as it came first."""
        keys = (f"{prefix}{later}" for later in itertools.count(number + 1))
        calls = []
        for key in itertools.islice(keys, _NAMED):
            if not store.check([key]):
                break
            calls.append(store.get(key).decode())
        return [call.partition(": ")[2] for call in calls if call.startswith(f"{rank}: ")]


def _described(group: Any) -> str:
    ranks = torch.distributed.get_process_group_ranks(group)
    return f"{group.group_name} ({group.group_desc}) of ranks {ranks}"
