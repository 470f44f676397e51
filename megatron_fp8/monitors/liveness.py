"""Watches a job: runs the watchdog, records the hang that it finds, and explains ranks that stop answering.

Must not know how a hang is detected.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed

from megatron_fp8.config.schema import Config
from megatron_fp8.device import Device
from megatron_fp8.faults.failure_report import is_consequence
from megatron_fp8.monitors.hang import Hang, HangError
from megatron_fp8.monitors.heartbeat import Heartbeat
from megatron_fp8.monitors.watchdog import Limits, Watchdog
from megatron_fp8.report.html import report_at_end
from megatron_fp8.report.record import Recorder, Value


def hang_limits(config: Config) -> Limits | None:
    """How long a rank may make no progress; None: forever."""
    minutes = config.faults.hang_timeout_minutes
    if minutes is None:
        # Collectives that end by themselves end the job without a name.
        minutes = config.parallel.distributed_timeout_minutes / 2
    slow = config.faults.hang_timeout_slow_minutes
    # What may take long is not shorter than what may not.
    return Limits(60 * minutes, None if slow is None else 60 * max(slow, minutes)) if minutes > 0 else None


@contextmanager
def watched(
    config: Config, device: Device, heartbeat: Heartbeat, recorder: Recorder, run_directory: Path | None
) -> Iterator[None]:
    """End the process when the job hangs while this is entered; `run_directory`: of the rank that records, else None.

    The ranks exchange their status through the store of the process group.
    """
    limits = hang_limits(config)
    if limits is None:
        yield
        return
    store = torch.distributed.distributed_c10d._get_default_store()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def on_hang(hang: Hang) -> None:
        if run_directory is not None:
            record_hang(recorder, hang, run_directory)

    with Watchdog(heartbeat, store, rank, world_size, limits, device.is_idle, on_hang):
        yield


def record_hang(recorder: Recorder, hang: Hang, run_directory: Path) -> None:
    """Record the hang and close the dashboards, since nobody else will."""
    values: dict[str, Value] = {
        "iteration": hang.iteration,
        "ranks": list(hang.culprits),
        "host": hang.host,
        "phase": hang.phase.value,
        "kind": hang.kind,
    }
    recorder.write("hang", values)
    recorder.write("failure", {"kind": HangError.__name__, "error": hang.text})
    recorder.close()
    report_at_end(run_directory)


class LostRankError(torch.distributed.DistNetworkError):
    """Another rank ended, or cannot be reached."""


@contextmanager
def explaining_lost_ranks(heartbeat: Heartbeat, timeout_minutes: float) -> Iterator[None]:
    """Raise a LostRankError in the place of an error that says that another rank does not answer.

    `timeout_minutes`: parallel.distributed_timeout_minutes.
    """
    try:
        yield
    except Exception as error:
        if not is_consequence(error):
            raise
        beat = heartbeat.beat
        rank, host = torch.distributed.get_rank(), socket.gethostname()
        step = f"iteration {beat.iteration}, " if beat.iteration else ""
        raise LostRankError(
            f"rank {rank} on {host}, {step}phase {beat.phase.value}: another rank does not answer, after "
            f"{time.monotonic() - beat.at:.1f} s: {error}\n"
            "    why: its process or its machine has ended, or the network between the machines is interrupted\n"
            "    look at: the earliest error of all nodes, which is the cause; a machine that says nothing.\n"
            f"         An operation between ranks may take parallel.distributed_timeout_minutes={timeout_minutes:g}"
        ) from error
