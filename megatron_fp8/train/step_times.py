"""Times the parts of a step: spans on the device's clock, and the series they become.

Megatron's schedules and the stepper mark the spans. Parts add up to `iteration-time`, the mean over ranks; `NAME/...`
are what a part is made of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from statistics import fmean
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

    def __init__(self, device: Device, listener: Callable[[str, bool], None] | None = None) -> None:
        """`listener`: told of every span's begin (True) and end, outside of steps too."""
        self._device = device
        self.listener = listener or _ignore
        self._spans: dict[str, Span] = {}
        self._unread: deque[tuple[str, Event, Event]] = deque()
        self._free: list[Event] = []
        self._seconds: dict[str, float] = {}
        self.in_step = False
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


def _ignore(name: str, begins: bool) -> None:
    """No-op listener."""


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


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a mean step of an interval on one rank.

    `data`: waiting for batches. `forward`, `backward`: this rank's passes, with the collectives inside them.
    `waiting`: of the pipeline schedule, when none of them runs. `gradients`: reducing gradients, as far as it is not
    hidden behind the backward pass. `optimizer`: its step, `parameters` (their gathering) and
    `scales` (those of FP8) included. `whole`: all of the step. `own`: work that waits for no other rank, as far as it
    can be told: passes without collectives, else parts of them.
    """

    data: float
    forward: float
    backward: float
    waiting: float
    gradients: float
    optimizer: float
    parameters: float
    scales: float
    whole: float
    own: float = 0.0

    @classmethod
    def of(cls, seconds: Mapping[str, float], whole: float, num_steps: int) -> RankTimes:
        """From the seconds of all spans of an interval of `num_steps` steps that took `whole` seconds.

        A batch is fetched in a forward pass; the schedule holds the passes and reduces the gradients at its end.
        """
        each = {name: seconds.get(name, 0.0) / num_steps for name in MEASURED}
        passes = each[FORWARD] + each[BACKWARD]
        return cls(
            data=each[DATA],
            forward=each[FORWARD] - each[DATA],
            backward=each[BACKWARD],
            waiting=each[FORWARD_BACKWARD] - passes - each[GRADIENTS],
            gradients=each[GRADIENTS],
            optimizer=each[OPTIMIZER],
            parameters=each[PARAMETERS],
            scales=each[SCALES],
            whole=whole / num_steps,
            own=each[OWN_WORK] or passes - each[DATA],
        )

    @property
    def compute(self) -> float:
        """Seconds of passes."""
        return self.forward + self.backward

    @property
    def forward_backward(self) -> float:
        """Seconds of the pipeline schedule without data and gradients."""
        return self.compute + self.waiting


NUM_TIMES = len(fields(RankTimes))


def time_series(ranks: Sequence[RankTimes], fp8: bool, several_stages: bool) -> dict[str, float]:
    """Series of an interval from the times of all ranks, in their order."""
    mean = RankTimes(*(fmean(column) for column in zip(*map(astuple, ranks), strict=True)))
    known = mean.data + mean.forward_backward + mean.gradients + mean.optimizer
    compute = [rank.compute for rank in ranks]
    series = {
        "iteration-time": mean.whole,
        "batch-generator-time": mean.data,
        "forward-backward-time": mean.forward_backward,
        "forward-backward-time/forward": mean.forward,
        "forward-backward-time/backward": mean.backward,
        "forward-backward-time/waiting": mean.waiting,
        "all-grads-sync-time": mean.gradients,
        "optimizer-time": mean.optimizer,
        "optimizer-time/params-all-gather": mean.parameters,
        **({"optimizer-time/fp8-scale-update": mean.scales} if fp8 else {}),
        "other-time": mean.whole - known,
        "compute-time/fastest-rank": min(compute),
        "compute-time/slowest-rank": max(compute),
        "slowest-rank": compute.index(max(compute)),
    }
    if several_stages and mean.forward_backward > 0:
        series["pipeline-bubble/measured"] = mean.waiting / mean.forward_backward
    return series
