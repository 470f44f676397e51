"""Which process groups are NCCL's, and what happens at each of their calls: NCCL's checks, then those of the order.

All are gloo's underneath; the rest of the stand-in makes them so. Groups that were asked for as gloo's keep gloo's
rules. Must not know how a call is carried out.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import ProcessGroup, distributed_c10d

from megatron_fp8.cpu.collective_order import CollectiveOrder
from megatron_fp8.cpu.nccl_calls import LOOKS, MESSAGES, Look, group_rank, look_at_message
from megatron_fp8.cpu.placement import is_on_host, tensors_in


def is_nccl(backend: Any) -> bool:
    """Whether a program that names `backend` asks for NCCL."""
    return isinstance(backend, str) and "nccl" in backend.lower()


class _Call(threading.local):
    """Where this thread is: inside a call that was checked, and in a batch of messages."""

    checked = False
    in_batch = False


class NcclGroups:
    """The process groups of this process that NCCL would serve on GPUs."""

    def __init__(self) -> None:
        self._order = CollectiveOrder()
        # By name: whether gloo serves the group's host tensors.
        self._host_too: dict[str, bool] = {}
        self._here = _Call()

    def started(self, backend: Any) -> None:
        """The default process group was made; None asks for what fits the device, which is NCCL."""
        self._host_too.clear()
        self._order.start()
        self.add(distributed_c10d._get_default_group(), "cpu:gloo,cuda:nccl" if backend is None else backend)

    def add(self, group: Any, backend: Any) -> None:
        """`group` was made with `backend`; None: with that of the default group."""
        if not isinstance(group, ProcessGroup):
            return
        default = distributed_c10d._get_default_group().group_name
        if backend is None:
            if default in self._host_too:
                self._host_too[group.group_name] = self._host_too[default]
        elif is_nccl(backend):
            self._host_too[group.group_name] = "gloo" in backend.lower()

    def device_of_objects(self, group: Any, otherwise: str) -> str:
        """Where the collectives of Python objects put their bytes: NCCL takes them on the GPU only."""
        name = (group or distributed_c10d._get_default_group()).group_name
        return "cuda" if self._host_too.get(name) is False else otherwise

    def _serves(self, group: Any, tensors: Any) -> bool:
        if self._here.checked or not isinstance(group, ProcessGroup) or group.group_name not in self._host_too:
            return False
        return not self._host_too[group.group_name] or not any(map(is_on_host, tensors_in(tensors)))

    @contextlib.contextmanager
    def _one_call(self) -> Iterator[None]:
        """torch's functions call each other: only the outermost is a call."""
        self._here.checked = True
        try:
            yield
        finally:
            self._here.checked = False

    def checked(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """The collective or message `name` with NCCL's rules for NCCL's groups."""
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
    """Arguments of a call of `function` by name, with defaults: `inspect.Signature.bind` in a tenth of the time."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [parameter.name for parameter in parameters]
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}

    def bind(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}

    return bind
