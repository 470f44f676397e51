"""Monitors every node of a job: the host's load and memory, the disk of its runs, the GPUs' sensors.

The first rank of each node reads; what it read goes into the `train` record, so that every view has all nodes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import fmean

import psutil

from megatron_fp8.device import Device, SensorError
from megatron_fp8.monitors.protocol import Interval, Monitor
from megatron_fp8.report.record import Value


@dataclass(frozen=True)
class NodeReading:
    """A node at one moment; NaN where it was not read.

    `cpu_percent`: of all its cores, since the reading before. `load_average`: processes that want to run, mean over a
    minute. `disk_free_bytes`: on the disk that run directories are made on. GPUs: the mean of `busy`, the hottest, the
    sum of their power, the slowest clock.
    """

    cpu_percent: float = math.nan
    load_average: float = math.nan
    memory_used_bytes: float = math.nan
    memory_available_bytes: float = math.nan
    disk_free_bytes: float = math.nan
    gpu_busy_percent: float = math.nan
    gpu_celsius: float = math.nan
    gpu_watts: float = math.nan
    gpu_megahertz: float = math.nan


class NodeMonitor(Monitor):
    """Reads this node, on its first rank; `run_root` is where run directories are made."""

    def __init__(self, device: Device, run_root: Path) -> None:
        self._reads = device.is_first_of_node()
        self._device = device
        self._disk = run_root.absolute()
        self._sensors_failed = False
        # The first reading of a share of time says nothing.
        psutil.cpu_percent()

    def local_values(self) -> list[float]:
        """Whether this rank reads, and the reading."""
        return [float(self._reads), *astuple(self.read())]

    def interval_values(self, interval: Interval) -> Mapping[str, Value]:
        """Series of all nodes."""
        return node_series([NodeReading(*values) for reads, *values in interval.rows if reads])

    def read(self) -> NodeReading:
        """The node now; on other ranks than its first nothing is read."""
        if not self._reads:
            return NodeReading()
        memory = psutil.virtual_memory()
        return NodeReading(
            psutil.cpu_percent(),
            psutil.getloadavg()[0],
            memory.used,
            memory.available,
            self._free_bytes(),
            *self._gpus(),
        )

    def _free_bytes(self) -> float:
        existing = next((path for path in (self._disk, *self._disk.parents) if path.exists()), None)
        return math.nan if existing is None else psutil.disk_usage(str(existing)).free

    def _gpus(self) -> tuple[float, ...]:
        """Busy, temperature, power and clock; none without GPUs, or where their sensors fail, which stops nothing."""
        try:
            gpus = self._device.gpu_readings()
        except SensorError as error:
            if not self._sensors_failed:
                print(f"the GPUs' sensors cannot be read, their series have gaps: {error}", file=sys.stderr)
            self._sensors_failed = True
            return ()
        if not gpus:
            return ()
        return (
            fmean(gpu.busy_percent for gpu in gpus),
            max(gpu.celsius for gpu in gpus),
            sum(gpu.watts for gpu in gpus),
            min(gpu.megahertz for gpu in gpus),
        )


def node_series(nodes: Sequence[NodeReading]) -> dict[str, float]:
    """Series of all nodes, which are numbered in the order of their first ranks; what was not read is left out."""
    return {
        f"node/{number}/{field.name.replace('_', '-')}": value
        for number, node in enumerate(nodes)
        for field in fields(node)
        if not math.isnan(value := getattr(node, field.name))
    }
