"""Owns what the training loop tells the watchdog: which phase the spans of a step mean, and what a hang leaves behind.

Must not know how a hang is found.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed

from megatron_fp8.config.schema import Config
from megatron_fp8.faults.hang import Hang, HangError
from megatron_fp8.faults.heartbeat import Heartbeat, Phase
from megatron_fp8.faults.watchdog import Limits, Watchdog
from megatron_fp8.report.html import report_at_end
from megatron_fp8.report.record import Recorder, Value
from megatron_fp8.train import step_times as spans
from megatron_fp8.train.parts import TrainingParts

_BEGINS = {
    spans.DATA: Phase.DATA,
    spans.FORWARD: Phase.FORWARD_BACKWARD,
    spans.BACKWARD: Phase.FORWARD_BACKWARD,
    spans.OPTIMIZER: Phase.OPTIMIZER,
}


def hang_limits(config: Config) -> Limits | None:
    """How long a rank may stand still; None: as long as it likes."""
    minutes = config.faults.hang_timeout_minutes
    if minutes is None:
        # Collectives that end by themselves end the job without a name.
        minutes = config.parallel.distributed_timeout_minutes / 2
    slow = config.faults.hang_timeout_slow_minutes
    # What may take long is not shorter than what may not.
    return Limits(60 * minutes, None if slow is None else 60 * max(slow, minutes)) if minutes > 0 else None


@contextmanager
def watched(parts: TrainingParts, run_directory: Path | None) -> Iterator[None]:
    """End the process when the job hangs while this is entered; `run_directory`: of the rank that records, else None.

    The store of the process group is what ranks speak through.
    """
    limits = hang_limits(parts.config)
    if limits is None:
        yield
        return
    parts.times.listener = _listener(parts.heartbeat)
    store = torch.distributed.distributed_c10d._get_default_store()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def tell(hang: Hang) -> None:
        if run_directory is not None:
            record_hang(parts.recorder, hang, run_directory)

    with Watchdog(parts.heartbeat, store, rank, world_size, limits, parts.device.is_idle, tell):
        yield


def record_hang(recorder: Recorder, hang: Hang, run_directory: Path) -> None:
    """The hang for the dashboards, which are closed: nobody else will."""
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


def _listener(heartbeat: Heartbeat) -> Callable[[str, bool], None]:
    """Each micro-batch's passes are signs of life, in steps and in evaluations."""

    def listen(name: str, begins: bool) -> None:
        phase = _BEGINS.get(name)
        if phase is None or (not begins and phase is not Phase.DATA):
            return
        if begins and phase is not Phase.FORWARD_BACKWARD:
            heartbeat.enter(phase)
        else:
            # What the passes are of was said before.
            heartbeat.enter(heartbeat.passes)

    return listen
