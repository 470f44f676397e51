"""Owns where the time of training steps goes: spans on the device, summed by name, and ranges for profilers.

Speaks Megatron's protocol of timers, so that its schedules and optimizer mark their spans themselves. Megatron's own
timers wait for the device at both ends of a span; here an end is an event in the device's stream, which nobody waits
for: its time is read once the device has passed it. A span is thus time of the device, its waiting for the host or for
other ranks included. Must not know what the names mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from torch.profiler import record_function

from megatron_fp8.device import Device

# Summed; all other spans are ranges only.
FORWARD_BACKWARD, FORWARD, BACKWARD = "forward-backward", "forward-compute", "backward-compute"
DATA, GRADIENTS, OPTIMIZER = "batch-generator", "all-grads-sync", "optimizer"
PARAMETERS, SCALES = "params-all-gather", "fp8-scale-update"
# Parts of passes that wait for no other rank, where the passes do.
OWN_WORK = "own-work"
MEASURED = frozenset({FORWARD_BACKWARD, FORWARD, BACKWARD, DATA, GRADIENTS, OPTIMIZER, PARAMETERS, SCALES, OWN_WORK})


class Event(Protocol):
    """A moment in the device's stream, as `torch.cuda.Event`."""

    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class StepTimes:
    """The spans of this rank's training steps; what happens outside a `step` is not measured."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spans: dict[str, Span] = {}
        self._unread: deque[tuple[str, Event, Event]] = deque()
        self._free: list[Event] = []
        self._seconds: dict[str, float] = {}
        self.in_step = False
        # Told of every span's begin (True) and end, outside of steps too.
        self.listener: Callable[[str, bool], None] = _nobody
        # Whether ranges go into the trace of torch's profiler; they cost more than those that nobody may look at.
        self.annotates = False

    def __call__(self, name: str, log_level: int | None = None) -> Span:  # noqa: ARG002 - Megatron's protocol
        """The span called `name`."""
        span = self._spans.get(name)
        if span is None:
            span = self._spans[name] = Span(self, name, name in MEASURED)
        return span

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a training step."""
        self.in_step = True
        try:
            with self("step"):
                yield
        finally:
            self.in_step = False
            for span in self._spans.values():
                span.abandon()
        while self._unread and self._unread[0][2].query():
            self._read_oldest()

    def take(self) -> dict[str, float]:
        """Seconds by name of the steps since the last call; waits until the device has done them."""
        if self._unread:
            self._unread[-1][2].synchronize()
        while self._unread:
            self._read_oldest()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _read_oldest(self) -> None:
        name, start, stop = self._unread.popleft()
        self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(stop) / 1e3
        self._free += (start, stop)

    def moment(self) -> Event:
        """An event that is recorded now."""
        event: Event = self._free.pop() if self._free else self._device.timing_event()
        event.record()
        return event

    def finished(self, name: str, start: Event, stop: Event) -> None:
        """Take a span whose ends are recorded."""
        self._unread.append((name, start, stop))

    def open_range(self, name: str) -> record_function | None:
        """Begin a range in the profilers' views."""
        self._device.range_push(name)
        if not self.annotates:
            return None
        annotation = record_function(name)
        annotation.__enter__()
        return annotation

    def close_range(self, annotation: record_function | None) -> None:
        """End the newest range."""
        if annotation is not None:
            annotation.__exit__(None, None, None)
        self._device.range_pop()


def _nobody(name: str, begins: bool) -> None:
    """Listens to nothing."""


class Span:
    """One name's span: Megatron's interface of a timer, or a context manager. Inside itself it counts once."""

    def __init__(self, times: StepTimes, name: str, measured: bool) -> None:
        self._times = times
        self._name = name
        self._measured = measured
        self._depth = 0
        self._start: Event | None = None
        self._annotation: record_function | None = None

    def start(self, barrier: bool = False) -> None:  # noqa: ARG002 - Megatron's protocol; ranks do not wait here
        """Begin."""
        self._times.listener(self._name, True)
        if not self._times.in_step:
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._annotation = self._times.open_range(self._name)
        if self._measured:
            self._start = self._times.moment()

    def stop(self, barrier: bool = False) -> None:  # noqa: ARG002 - Megatron's protocol; ranks do not wait here
        """End."""
        self._times.listener(self._name, False)
        if not self._times.in_step:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        if self._start is not None:
            self._times.finished(self._name, self._start, self._times.moment())
            self._start = None
        self._times.close_range(self._annotation)

    def abandon(self) -> None:
        """Forget a span that an exception left open."""
        if self._depth > 0:
            self._depth, self._start = 0, None
            self._times.close_range(self._annotation)

    def __enter__(self) -> None:
        self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
