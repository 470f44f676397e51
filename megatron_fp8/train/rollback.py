"""Rolls a run back within its process: to a checkpoint from before the bad steps, continuing after their samples.

A resume in all but the new process. The state to continue from is first written into the checkpoint's manifest, so that
a job that is killed later resumes from the same place: it never sees the skipped samples either, and knows how often
the run rolled back. Must not know why a run rolls back, or how the record is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.checkpoint.manifest import read_manifest, write_manifest
from megatron_fp8.checkpoint.rank_io import find_corruption_collective, on_rank_0
from megatron_fp8.config.run_start import Position
from megatron_fp8.data.dataset import Datasets
from megatron_fp8.faults.exit_codes import RollbackError
from megatron_fp8.monitors.heartbeat import Phase
from megatron_fp8.monitors.nonfinite import Rollback
from megatron_fp8.monitors.protocol import Event
from megatron_fp8.parallel.object_collectives import broadcast
from megatron_fp8.report.record import Value
from megatron_fp8.report.start_clock import StartClock
from megatron_fp8.train.checkpointing import Checkpointer, Progress
from megatron_fp8.train.loop import TrainResult, train
from megatron_fp8.train.setup import TrainingParts
from megatron_fp8.train.state import TrainState
from megatron_fp8.train.step import IntervalLoss


def train_to_the_end(
    parts: TrainingParts,
    datasets: Datasets,
    clock: StartClock,
    progress: Progress | None,
    datasets_from: Callable[[Position], Datasets],
    reopen_record: Callable[[int], None],
) -> TrainResult:
    """The training loop, again from a checkpoint as often as the run has to roll back. See `train` and `roll_back`.

    `datasets_from`: makes the datasets of a run from a position on, which needs more samples than before.
    `reopen_record`: called on every rank with the iteration after which the record continues.
    """
    result = train(parts, datasets, clock, progress)
    while isinstance(result, Rollback):
        parts.heartbeat.enter(Phase.CHECKPOINT)
        # Times of steps that are undone belong to no record.
        parts.times.take()
        interval = IntervalLoss(parts.device.torch_device)
        max_rollbacks = parts.config.faults.max_rewinds
        progress, event = roll_back(parts.checkpointer, result, max_rollbacks, interval, reopen_record)
        parts.recorder.write(*event)
        result = train(parts, datasets_from(progress.state.position), clock, progress, rolled_back=True)
    return result


def roll_back(
    checkpointer: Checkpointer,
    wanted: Rollback,
    max_rollbacks: int,
    interval: IntervalLoss,
    reopen_record: Callable[[int], None],
) -> tuple[Progress, Event]:
    """Load the newest good checkpoint; the progress to continue with, and its event. Collective over all ranks.

    `interval`: takes the checkpoint's losses. Raises RollbackError when there is no such checkpoint, or the run has
    rolled back as often as it may.
    """
    if wanted.reached.rewinds >= max_rollbacks:
        raise RollbackError(
            f"{wanted.reason}. The run has rolled back {wanted.reached.rewinds} times already, and "
            f"faults.max_rewinds={max_rollbacks}. Lower optimizer.lr or optimizer.clip_grad, or look at the data"
        )
    directory = checkpointer.finish_write()
    checkpoint, notes = _newest_good(directory, wanted)
    before = TrainState.from_counters(_counters_on_rank_0(checkpoint))
    state = before.after_rollback(wanted.reached)
    on_rank_0(lambda: _leave_behind(directory, checkpoint, state))
    reopen_record(state.iteration)
    progress, lost = checkpointer.load(checkpoint, interval, weights_only=False)
    values: dict[str, Value] = {
        "iteration": state.iteration,
        "from-iteration": wanted.reached.iteration,
        "reason": wanted.reason,
        "checkpoint": str(checkpoint),
        "first skipped sample": before.consumed_samples,
        "last skipped sample": state.consumed_samples - 1,
        "rewinds": state.rewinds,
        "rewinds left": max_rollbacks - state.rewinds,
        "notes": [*notes, *lost],
    }
    # Not as this rank reads the manifest: a file system may still show the old one.
    return replace(progress, state=state), ("rewind", values)


def _newest_good(directory: CheckpointDirectory | None, wanted: Rollback) -> tuple[Path, list[str]]:
    """The newest checkpoint that may be loaded and is intact, and what is wrong with newer ones. Collective."""
    notes: list[str] = []
    limit = wanted.newest_iteration
    while directory is not None:
        iteration = broadcast(directory.newest_intact(before=limit + 1, contents=False))
        if iteration is None:
            break
        checkpoint = directory.path(iteration)
        problems = find_corruption_collective(checkpoint)
        if not problems:
            return checkpoint, notes
        notes.append(f"the checkpoint is corrupt: {'; '.join(problems)}")
        limit = iteration - 1
    where = "checkpoint.save is false" if directory is None else f"none is in {directory.root}"
    raise RollbackError(
        f"{'. '.join([wanted.reason, *notes])}. No intact checkpoint of iteration {wanted.newest_iteration} or "
        f"earlier to roll back to: {where}. A smaller checkpoint.save_interval writes one earlier"
    )


def _counters_on_rank_0(checkpoint: Path) -> dict[str, float]:
    """The manifest's counters, before rank 0 changes them."""
    return broadcast(dict(read_manifest(checkpoint).counters) if torch.distributed.get_rank() == 0 else {})


def _leave_behind(directory: CheckpointDirectory | None, checkpoint: Path, state: TrainState) -> None:
    """Set later checkpoints aside, and write into this one where the run continues."""
    assert directory is not None
    directory.set_aside(state.iteration)
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, replace(manifest, counters={**manifest.counters, **state.as_counters()}))
