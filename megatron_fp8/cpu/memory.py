"""`torch.cuda`'s memory statistics: the bytes of the emulated GPU's tensors.

Every storage counts once, rounded up to 512 bytes as by CUDA's caching allocator, as long as a tensor uses it. A
dispatch mode counts what operations make, in autograd's backward too. It costs several microseconds per operation, so
counting starts, with the tensors that exist, at the first query or `reset_peak_memory_stats`; peaks are since then.
Temporaries inside TE's kernels do not count. Operations count in the thread that queried first, factories and moves in
all threads.
"""

# ruff: noqa: ARG001  (the signatures are torch's)
from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fp8.cpu.placement import is_on_host, parts_of, real_device, tensors_in

_ROUNDED_TO = 512
_TENSOR_BASE = torch._C.TensorBase


class _Mode(TorchDispatchMode):
    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper for the compiler, which is disabled, would slow down each call.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        # Factories and moves count what they make themselves.
        given = next(tensors_in(args), None)
        if self._counter.is_on and given is not None and not is_on_host(given):
            for tensor in tensors_in((result,)):
                self._counter.add(tensor)
        return result


class Counter:
    """Counts the storages of GPU tensors."""

    def __init__(self) -> None:
        # Off before the first query, and while a kernel runs.
        self.is_on = False
        self._started = False
        self.current = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def start(self) -> None:
        """Count existing tensors, and from now on new ones."""
        if self._started:
            return
        self.is_on = self._started = True
        for found in gc.get_objects():
            if issubclass(type(found), torch.Tensor) and not is_on_host(found):
                self.add(found)
        _Mode(self).__enter__()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside the block."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def kernel(self, call: Callable[[], Any]) -> Any:
        """Count what `call`, one kernel on a GPU, returns, but not its temporaries."""
        with self.paused():
            result = call()
        self._add_all(result)
        return result

    def _add_all(self, value: Any) -> None:
        value = parts_of(value) or value
        if isinstance(value, (list, tuple)):
            for each in value:
                self._add_all(each)
        elif isinstance(value, torch.Tensor):
            self.add(value)

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a GPU tensor, if it is new."""
        if real_device(tensor).type != "cpu" or tensor.layout is not torch.strided or hasattr(tensor, "_quantizer"):
            return
        storage = _TENSOR_BASE.untyped_storage(tensor)
        key = storage._cdata
        if key in self._sizes:
            return
        size = self._sizes[key] = _allocated(storage)
        self._alive[key] = weakref.ref(storage, lambda _: self._remove(key))
        self.current += size
        self.peak = max(self.peak, self.current)

    def _remove(self, key: int) -> None:
        del self._alive[key]
        self.current -= self._sizes.pop(key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a counted storage."""
        if storage._cdata in self._sizes:
            size = _allocated(storage)
            self.current += size - self._sizes[storage._cdata]
            self._sizes[storage._cdata] = size
            self.peak = max(self.peak, self.current)


def _allocated(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // _ROUNDED_TO) * _ROUNDED_TO


COUNTER = Counter()


def memory_allocated(device: Any = None) -> int:
    """Bytes of the GPU's tensors."""
    COUNTER.start()
    return COUNTER.current


def max_memory_allocated(device: Any = None) -> int:
    """Peak bytes of the GPU's tensors since the first query or `reset_peak_memory_stats`."""
    COUNTER.start()
    return COUNTER.peak


def reset_peak_memory_stats(device: Any = None) -> None:
    """Reset the peak to the current size."""
    COUNTER.start()
    COUNTER.peak = COUNTER.current


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Available and total bytes of the machine."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def memory_stats(device: Any = None) -> dict[str, int]:
    """The entries of `torch.cuda.memory_stats` that have a meaning here."""
    COUNTER.start()
    stats = {"num_alloc_retries": 0, "num_ooms": 0}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{kind}.all.current"] = COUNTER.current
        stats[f"{kind}.all.peak"] = COUNTER.peak
    return stats


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """One line for a log."""
    return f"CPU stand-in: {memory_allocated() / 2**20:.0f} MiB allocated, peak {COUNTER.peak / 2**20:.0f} MiB"


def patch_storages() -> None:
    """Create storages for a GPU in RAM, and follow those that are resized."""
    new = torch.UntypedStorage.__new__
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result: torch.UntypedStorage = resize(self, size)
        if COUNTER.is_on:
            COUNTER.resized(self)
        return result

    def new_(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> torch.UntypedStorage:
        if device is not None and torch.device(device).type != "cuda":
            kwargs["device"] = device
        made: torch.UntypedStorage = new(cls, *args, **kwargs)
        return made

    torch.UntypedStorage.__new__ = staticmethod(new_)  # type: ignore[method-assign,assignment]
    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]


FUNCTIONS = {
    **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), memory_allocated),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), max_memory_allocated),
    "reset_peak_memory_stats": reset_peak_memory_stats,
    "reset_max_memory_allocated": reset_peak_memory_stats,
    "reset_max_memory_cached": reset_peak_memory_stats,
    "mem_get_info": mem_get_info,
    "memory_stats": memory_stats,
    "memory_summary": memory_summary,
}
