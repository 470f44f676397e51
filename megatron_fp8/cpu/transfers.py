"""Pinned memory and non-blocking copies.

A GPU copies from and to pinned memory while the host continues. The emulated one has copied before the call returns,
but refuses what a program must not do before waiting: read the host tensor that the copy writes, or write the one that
it reads. Waiting means synchronizing the device, the copy's stream or an event recorded after it (also through streams
that waited for each other), or reading a GPU value on the host. CUDA itself waits for copies from and to pageable
memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_fp8.cpu.placement import HostTensor

_PINNED = "_pinned"
# Operations that return a view of the same memory, or read none of it.
_READ_NOTHING = frozenset(
    "__get__ __set__ size dim ndimension numel nelement stride storage_offset data_ptr is_contiguous is_pinned "
    "element_size untyped_storage storage detach view reshape view_as t transpose permute unsqueeze squeeze narrow "
    "select __getitem__ unbind split chunk expand as_strided alias requires_grad_ is_floating_point is_complex "
    "pin_memory_ __len__ get_device type_".split()
)


@dataclass
class _Copy:
    """`writes`: to the host's memory, else from it. `streams`: waiting for any of them waits for the copy."""

    memory: weakref.ref[torch.UntypedStorage]
    writes: bool
    streams: set[Hashable] = field(default_factory=set)


# By host address.
PENDING: dict[int, _Copy] = {}


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Mark the memory of `tensor` as pinned, and return `tensor`."""
    _memory(tensor).__dict__[_PINNED] = True
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the memory of the host tensor `tensor` is pinned."""
    return _PINNED in _memory(tensor).__dict__


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def start(host: torch.Tensor, writes: bool, stream: Hashable) -> None:
    """Note a copy from or to the pinned memory of `host` on `stream` that nobody has waited for."""
    memory = _memory(host)
    _forget(lambda copy: copy.memory() is None)
    PENDING[memory.data_ptr()] = _Copy(weakref.ref(memory), writes, {stream})


def _forget(is_over: Callable[[_Copy], bool]) -> None:
    for address in [address for address, copy in list(PENDING.items()) if is_over(copy)]:
        PENDING.pop(address, None)


def on_stream(stream: Hashable) -> tuple[_Copy, ...]:
    """The copies that are finished when the current work of `stream` is."""
    return tuple(copy for copy in list(PENDING.values()) if stream in copy.streams) if PENDING else ()


def follow(copies: Iterable[_Copy], stream: Hashable) -> None:
    """Note that `stream` waits for `copies`."""
    for copy in copies:
        copy.streams.add(stream)


def finish(copies: Iterable[_Copy]) -> None:
    """Note that the host has waited for `copies`."""
    done = list(copies)
    if done:
        _forget(lambda copy: any(copy is each for each in done))


def finish_all() -> None:
    """Note that the host has waited for the device."""
    PENDING.clear()


def refuse_unfinished(name: str, tensors: Iterable[torch.Tensor], written: Any) -> None:
    """Raise RuntimeError if operation `name` reads (`tensors`) or writes (`written`) what a copy still writes or
    reads."""
    if name in _READ_NOTHING:
        return
    for tensor in tensors:
        if not isinstance(tensor, HostTensor):
            continue
        copy = PENDING.get(_memory(tensor).data_ptr())
        if copy is None:
            continue
        if copy.memory() is not _memory(tensor):
            PENDING.pop(_memory(tensor).data_ptr(), None)
        elif copy.writes or tensor is written:
            does = "writes to" if copy.writes else "reads"
            raise RuntimeError(
                f"{name}: a non-blocking copy still {does} this pinned host tensor. Synchronize its stream, an event "
                "recorded after it or the device first: on a GPU the values are undefined until then"
            )
