"""Streams and events of a device that finishes its work before each call returns, so that waiting never blocks.

What a program can observe keeps its meaning: the current stream nests and is per thread, event times are measured, an
unrecorded event has no time, and reading the result of a copy before waiting for it is an error (`transfers`).
"""

# ruff: noqa: ARG002  (the signatures are torch's)
from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import torch

from megatron_fp8.cpu import transfers

_handles = itertools.count(1)


class Stream:
    """`torch.cuda.Stream`: an identity whose work is always finished."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        index = device if isinstance(device, int) else torch.device("cuda" if device is None else device).index
        self.device_index = index or 0
        self.device_type = 1
        self.priority = priority
        self.cuda_stream = kwargs.get("stream_ptr", next(_handles))
        self.stream_id = self.cuda_stream

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def query(self) -> bool:
        self.synchronize()
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        transfers.finish(transfers.on_stream(self))

    def wait_event(self, event: Event) -> None:
        transfers.follow(event.behind, self)

    def wait_stream(self, stream: Stream) -> None:
        transfers.follow(transfers.on_stream(stream), self)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    @property
    def _as_parameter_(self) -> Any:
        raise NotImplementedError("torch.cuda.Stream as a pointer for foreign code has no CPU stand-in")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and hash(other) == hash(self)

    def __hash__(self) -> int:
        return hash((self.device_index, self.cuda_stream))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device=cuda:{self.device_index} cuda_stream={self.cuda_stream:#x}>"

    def __enter__(self) -> Stream:
        context = StreamContext(self)
        self.__dict__.setdefault("_contexts", []).append(context)
        context.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.__dict__["_contexts"].pop().__exit__(*exc)


class ExternalStream(Stream):
    """`torch.cuda.ExternalStream`: a stream with a given handle."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any) -> None:
        super().__init__(device, stream_ptr=stream_ptr, **kwargs)


class Event:
    """`torch.cuda.Event`: the time at which `record` was called."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.enable_timing = enable_timing
        self.cuda_event = next(_handles)
        self.recorded_ns: int | None = None
        # The copies that are finished when this event is.
        self.behind: tuple[Any, ...] = ()

    def record(self, stream: Stream | None = None) -> None:
        self.recorded_ns = time.perf_counter_ns()
        self.behind = transfers.on_stream(current_stream() if stream is None else stream)

    def wait(self, stream: Stream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        transfers.finish(self.behind)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`. Raises ValueError if either has no time."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.recorded_ns is None or end_event.recorded_ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event.recorded_ns - self.recorded_ns) / 1e6

    def ipc_handle(self) -> bytes:
        raise NotImplementedError("torch.cuda.Event.ipc_handle has no CPU stand-in")

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>"


class _Current(threading.local):
    """Per thread: the current device and, per device, the current stream."""

    def __init__(self) -> None:
        self.device_index = 0
        self.streams: dict[int, Stream] = {}


_current = _Current()


def current_device() -> int:
    """`torch.cuda.current_device()`."""
    return _current.device_index


def exchange_device(index: int) -> int:
    """Make `index` the current device and return the previous one."""
    before = _current.device_index
    if index >= 0:
        _current.device_index = index
    return before


def _index(device: Any) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return _current.device_index if index is None else index


def default_stream(device: Any = None) -> Stream:
    """`torch.cuda.default_stream`: one per device, with handle 0 as on a GPU."""
    return Stream(_index(device), stream_ptr=0)


def current_stream(device: Any = None) -> Stream:
    """`torch.cuda.current_stream`."""
    index = _index(device)
    return _current.streams.get(index) or default_stream(index)


def set_stream(stream: Stream | None) -> None:
    """`torch.cuda.set_stream`."""
    if stream is not None:
        _current.device_index = stream.device_index
        _current.streams[stream.device_index] = stream


class StreamContext:
    """`torch.cuda.stream(stream)`: makes `stream`, unless None, current inside the block."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._device = _current.device_index
        if self.stream is not None:
            self._previous = current_stream(self.stream.device_index)
            set_stream(self.stream)

    def __exit__(self, *exc: Any) -> None:
        if self.stream is not None:
            set_stream(self._previous)
            _current.device_index = self._device
