"""Traces a few steps with torch's profiler: when it runs, its files, and what cost most.

A file a rank for Chrome's and Perfetto's viewers, a table beside it, and a record with the largest costs of the first
traced rank. What a step computes does not depend on it. Must not know what a step does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import profile

from megatron_fp8.config.schema_run import ProfileConfig
from megatron_fp8.device import Device
from megatron_fp8.monitors.protocol import Event
from megatron_fp8.parallel.object_collectives import broadcast
from megatron_fp8.report.record import Value
from megatron_fp8.train.step_times import StepTimes

# In the run directory.
PROFILES = "profile"
_ROWS_OF_RECORD, _ROWS_OF_TABLE = 12, 60
_NAME_WIDTH = 48


class StepProfiler:
    """Traces the steps that `settings` name, into `directory`; None: nowhere, as in a run without a directory."""

    def __init__(self, settings: ProfileConfig, directory: Path | None, device: Device, times: StepTimes) -> None:
        self._settings = settings
        self._directory = directory
        self._device = device
        self._times = times
        # On every rank; the profile on the traced ones.
        self._since: int | None = None
        self._profile: profile | None = None

    def is_due(self, iteration: int, ends: bool = False) -> bool:
        """Whether a trace begins or ends when `iteration` steps are done, or because the run ends; the same on all
        ranks."""
        return self._is_wanted(iteration, ends) != (self._since is not None)

    def change(self, iteration: int) -> Iterator[Event]:
        """Begin the trace, or end it, which is recorded; collective over all ranks."""
        if self._since is None:
            self._begin()
            self._since = iteration
        elif self._directory is not None:
            yield self._end(self._directory, self._since, iteration)
            self._since = None

    def _is_wanted(self, iteration: int, ends: bool) -> bool:
        start, stop = self._settings.start, self._settings.stop
        if start is None or stop is None or self._directory is None:
            return False
        return start <= iteration < stop and not ends

    def _begin(self) -> None:
        if torch.distributed.get_rank() not in self._settings.ranks:
            return
        self._profile = profile(
            record_shapes=self._settings.record_shapes,
            profile_memory=self._settings.profile_memory,
            with_stack=self._settings.with_stack,
        )
        # What was asked for before belongs to earlier steps.
        self._device.synchronize()
        self._profile.start()
        self._times.annotates = True

    def _end(self, directory: Path, since: int, iteration: int) -> Event:
        costs = ""
        if self._profile is not None:
            self._times.annotates = False
            self._device.synchronize()
            self._profile.stop()
            costs = self._write(self._profile, directory, since, iteration)
            self._profile = None
        values: dict[str, Value] = {
            "iteration": iteration,
            "steps": iteration - since,
            "ranks": list(self._settings.ranks),
            "directory": str(directory),
            "largest costs": broadcast(costs, self._settings.ranks[0]),
        }
        return "profile", values

    def _write(self, profiled: profile, directory: Path, since: int, iteration: int) -> str:
        """The files of this rank; returns its largest costs."""
        name = f"steps-{since + 1}-{iteration}.rank-{torch.distributed.get_rank()}"
        averages = profiled.key_averages()
        kernels = _kernels(averages)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # The ending that viewers of torch's traces look for.
            profiled.export_chrome_trace(str(directory / f"{name}.pt.trace.json.gz"))
            sort_by = "self_device_time_total" if kernels else "self_cpu_time_total"
            table = averages.table(sort_by=sort_by, row_limit=_ROWS_OF_TABLE, max_name_column_width=80)
            (directory / f"{name}.txt").write_text(table + "\n", encoding="utf-8")
        except OSError as error:
            # A trace is not worth a run.
            print(f"the trace of rank {torch.distributed.get_rank()} was not written: {error}", file=sys.stderr)
        return largest_costs(averages, iteration - since)


def largest_costs(averages: Sequence[FunctionEventAvg], num_steps: int) -> str:
    """Lines of a table: the kernels with the most time on the device, on CPUs the operations with the most of their
    own. There a span of the step is an operation too, whose own time is that of Python between the others.
    """
    kernels = _kernels(averages)
    own = {str(row.key): row.self_device_time_total for row in kernels}
    own = own or {str(row.key): row.self_cpu_time_total for row in averages}
    calls = {str(row.key): row.count for row in kernels or averages}
    total = sum(own.values())
    lines = [f"{'operation':{_NAME_WIDTH}} {'ms a step':>10} {'share':>7} {'calls a step':>12}"]
    for name, microseconds in sorted(own.items(), key=lambda item: -item[1])[:_ROWS_OF_RECORD]:
        share = microseconds / total if total else 0.0
        lines.append(
            f"{name[:_NAME_WIDTH]:{_NAME_WIDTH}} {microseconds / 1e3 / num_steps:>10.3f} {share:>7.1%}"
            f" {calls[name] / num_steps:>12g}"
        )
    return "\n".join(lines)


def _kernels(averages: Sequence[FunctionEventAvg]) -> list[FunctionEventAvg]:
    """What ran on a device beside the CPU; spans that cover several kernels are none."""
    return [row for row in averages if row.device_type != DeviceType.CPU and not row.is_user_annotation]
