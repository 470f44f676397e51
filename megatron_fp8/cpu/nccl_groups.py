"""Process groups that NCCL would serve: each call is checked by `nccl_rules`, and compared across ranks.

Under NCCL, ranks of a group that call different collectives, or the same in different order, hang or mix up data, as
they would under gloo. Here each rank writes its n-th call to the job's store before making it: the first rank to arrive
writes, the others compare. That costs one round trip to the store per call and never waits for another rank, so calls
that may overlap under NCCL still do. (`TORCH_DISTRIBUTED_DEBUG=DETAIL` makes every rank wait for all others, and covers
neither point-to-point messages nor coalesced collectives.) Groups created for gloo keep gloo's rules.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed
from torch.distributed import ProcessGroup, distributed_c10d

from megatron_fp8.cpu.nccl_rules import LOOKS, MESSAGES, Look, group_rank, look_at_message
from megatron_fp8.cpu.placement import is_on_host, tensors_in

# Calls that an error lists, and calls that are kept in the store: no rank falls that far behind.
_NAMED, _KEPT = 6, 512


class CollectiveOrder:
    """This rank's calls so far, by group, in the store under the number of the default process group's start."""

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
        """The default process group was created: all groups begin at their first call."""
        self._starts += 1
        self._forget()

    def collective(self, group: Any, call: str) -> None:
        """Raise RuntimeError unless `call`, which this rank is about to make, is what the other ranks of `group`
        call."""
        self._agree(group, "", "collective", call)

    def message(self, group: Any, source: int, destination: int, call: str, in_batch: bool) -> None:
        """`collective` for a message between two ranks of `group`.

        The two ranks' messages form one sequence, as they share a stream, or in a batch one per direction.
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
                f" would hang or mix up data\n    {mine}\n    {first}{later}\n"
                f"    previous calls of both, at most {_NAMED}: {'; '.join(self._calls[name]) or 'none'}"
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
        """Later calls of the rank that wrote this one, as far as it also wrote them."""
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


def is_nccl(backend: Any) -> bool:
    """Whether `backend` names NCCL."""
    return isinstance(backend, str) and "nccl" in backend.lower()


class _Call(threading.local):
    """Whether this thread is inside a checked call, and in a batch of messages."""

    checked = False
    in_batch = False


class NcclGroups:
    """This process's groups that NCCL would serve on GPUs."""

    def __init__(self) -> None:
        self._order = CollectiveOrder()
        # By name: whether gloo serves the group's host tensors.
        self._host_too: dict[str, bool] = {}
        self._here = _Call()

    def started(self, backend: Any) -> None:
        """The default process group was created; a backend of None means gloo for the host and NCCL for the GPU."""
        self._host_too.clear()
        self._order.start()
        self.add(distributed_c10d._get_default_group(), "cpu:gloo,cuda:nccl" if backend is None else backend)

    def add(self, group: Any, backend: Any) -> None:
        """`group` was created with `backend`; None: that of the default group."""
        if not isinstance(group, ProcessGroup):
            return
        default = distributed_c10d._get_default_group().group_name
        if backend is None:
            if default in self._host_too:
                self._host_too[group.group_name] = self._host_too[default]
        elif is_nccl(backend):
            self._host_too[group.group_name] = "gloo" in backend.lower()

    def device_of_objects(self, group: Any, otherwise: str) -> str:
        """The device of the bytes in collectives of Python objects: NCCL takes GPU tensors only."""
        name = (group or distributed_c10d._get_default_group()).group_name
        return "cuda" if self._host_too.get(name) is False else otherwise

    def _serves(self, group: Any, tensors: Any) -> bool:
        if self._here.checked or not isinstance(group, ProcessGroup) or group.group_name not in self._host_too:
            return False
        return not self._host_too[group.group_name] or not any(map(is_on_host, tensors_in(tensors)))

    @contextlib.contextmanager
    def _one_call(self) -> Iterator[None]:
        """torch's functions call each other: check only the outermost call."""
        self._here.checked = True
        try:
            yield
        finally:
            self._here.checked = False

    def checked(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """The collective or message `name`, with NCCL's rules in NCCL's groups."""
        bind = _binding(original)
        look = LOOKS.get(name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = bind(*args, **kwargs)
            group = arguments.get("group") or distributed_c10d._get_default_group()
            if not self._serves(group, arguments.values()):
                return original(*args, **kwargs)
            with self._one_call():
                self._check(name, look, arguments, group)
                return original(*args, **kwargs)

        return call

    def _check(self, name: str, look: Look | None, arguments: dict[str, Any], group: Any) -> None:
        if look is not None:
            call = look(arguments, group)
            if group.size() > 1:
                self._order.collective(group, call)
            return
        role = MESSAGES[name]
        peer = group_rank(arguments, group, role)
        call = look_at_message(arguments["tensor"], peer)
        assert peer is not None
        source, destination = (group.rank(), peer) if role == "dst" else (peer, group.rank())
        self._order.message(group, source, destination, call, self._here.in_batch)

    def batched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`batch_isend_irecv`, whose messages NCCL sends together."""

        @functools.wraps(original)
        def batch(operations: Any) -> Any:
            self._here.in_batch = True
            try:
                return original(operations)
            finally:
                self._here.in_batch = False

        return batch


def _binding(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """`inspect.Signature.bind` of `function`, with defaults, in a tenth of the time."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [parameter.name for parameter in parameters]
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}

    def bind(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}

    return bind
