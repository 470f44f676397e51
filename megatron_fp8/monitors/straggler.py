"""Names stragglers: ranks whose own work takes much longer than that of the ranks which do the same, for a while.

In a job whose ranks wait for each other, every rank's step is as long as the slowest one's. What tells them apart is
the time that a rank works by itself.
"""

from __future__ import annotations

import socket
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformer_engine.pytorch import DotProductAttention

from megatron_fp8.monitors.protocol import Event, Interval, Monitor
from megatron_fp8.parallel.groups import ParallelGroups
from megatron_fp8.parallel.object_collectives import all_gather
from megatron_fp8.report.record import Value
from megatron_fp8.train.step_times import OWN_WORK, StepTimes


class StragglerMonitor(Monitor):
    """Compares the times of every interval."""

    def __init__(self, factor: float, num_intervals: int, groups: ParallelGroups) -> None:
        self._detector = StragglerDetector(factor, num_intervals)
        self._tensor_parallel_size = groups.tp.size()
        self._peers = peers(groups.world_size, groups.pp.size())

    def on_interval(self, interval: Interval) -> Iterator[Event]:
        """An event for each rank that is named; collective over all ranks when one is."""
        times = interval.times
        named: list[Straggler] = []
        for stage in self._peers:
            named += self._detector.add("compute", {rank: times[rank].own for rank in stage})
            readers = stage[:: self._tensor_parallel_size]
            waits = {rank: times[rank].data for rank in readers}
            named += self._detector.add("data", waits, {rank: times[rank].whole - times[rank].data for rank in readers})
        if not named:
            return
        hosts = all_gather(socket.gethostname())
        for each in named:
            values: dict[str, Value] = {
                "iteration": interval.iteration,
                "rank": each.rank,
                "host": hosts[each.rank],
                "work": each.what,
                "seconds": each.seconds,
                "median seconds": each.median_seconds,
                "factor": each.factor,
            }
            yield "slow-rank", values


def mark_own_work(chunks: Iterable[nn.Module], times: StepTimes, tensor_parallel_size: int) -> None:
    """Let modules without collectives say when they work, where whole passes cannot."""
    if tensor_parallel_size == 1:
        return
    span = times(OWN_WORK)
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, DotProductAttention):
                module.register_forward_pre_hook(lambda *_: span.start())
                module.register_forward_hook(lambda *_: span.stop())


@dataclass(frozen=True)
class Straggler:
    """A rank whose work takes `factor` times as long as the median of its peers, `seconds` a step."""

    rank: int
    what: str
    seconds: float
    median_seconds: float
    factor: float


class StragglerDetector:
    """Names ranks that are `factor` times as slow as their peers in each of `num_intervals` intervals in a row.

    Each is named once, and again after it was as fast as its peers.
    """

    def __init__(self, factor: float, num_intervals: int) -> None:
        self._factor = factor
        self._num_intervals = num_intervals
        self._in_a_row: dict[tuple[int, str], int] = {}

    def add(
        self, what: str, seconds: Mapping[int, float], beside: Mapping[int, float] | None = None
    ) -> list[Straggler]:
        """Take an interval of ranks that do the same; whom to name now.

        `seconds`: of this work, by rank. `beside`: of all that a step takes beside this work, if the work is a part
        that may be next to nothing on others.
        """
        named: list[Straggler] = []
        if len(seconds) < 2:
            return named
        ordered = sorted(seconds.values())
        for rank, own in seconds.items():
            usual = _median_of_others(ordered, own)
            rest = beside[rank] if beside is not None else 0.0
            factor = (own + rest) / (usual + rest) if usual + rest > 0 else 1.0
            count = self._in_a_row.get((rank, what), 0) + 1 if factor >= self._factor else 0
            self._in_a_row[rank, what] = count
            if count == self._num_intervals:
                named.append(Straggler(rank, what, own, usual, factor))
        return named


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """The median of `ordered`, which is sorted, without one value `own`. Not by sorting anew for each of many ranks."""
    place, num_others = bisect_left(ordered, own), len(ordered) - 1
    # Behind its place the others have moved up by one.
    middle = [ordered[index + (index >= place)] for index in ((num_others - 1) // 2, num_others // 2)]
    return (middle[0] + middle[1]) / 2


def peers(world_size: int, pipeline_parallel_size: int) -> list[Sequence[int]]:
    """The ranks of each pipeline stage, which do the same work, in Megatron's order of ranks."""
    size = world_size // pipeline_parallel_size
    return [range(stage * size, (stage + 1) * size) for stage in range(pipeline_parallel_size)]
