"""Owns the way back of a run inside its process: to a checkpoint from before the bad steps, on behind their samples.

A resume in all but the new process. What the run goes on with is first written into the checkpoint's manifest, so that
a job that is killed later resumes from the same place: it sees the samples that were passed over as little, and knows
how often the run went back. Must not know why a run goes back, or how the record is kept.
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
from megatron_fp8.faults.exit_codes import RewindError
from megatron_fp8.faults.heartbeat import Phase
from megatron_fp8.parallel.object_collectives import broadcast
from megatron_fp8.report.start_clock import StartClock
from megatron_fp8.train.bad_steps import Rewind
from megatron_fp8.train.checkpointing import Progress
from megatron_fp8.train.interval import IntervalLoss
from megatron_fp8.train.loop import TrainResult, train
from megatron_fp8.train.parts import TrainingParts
from megatron_fp8.train.state import TrainState


def train_to_the_end(
    parts: TrainingParts,
    datasets: Datasets,
    clock: StartClock,
    progress: Progress | None,
    datasets_from: Callable[[Position], Datasets],
    reopen_record: Callable[[int], None],
) -> TrainResult:
    """The training loop, again from a checkpoint as often as it has to go back. See `train` and `go_back`.

    `datasets_from`: makes the datasets of a run that goes on at a position, which needs more samples than before.
    """
    result = train(parts, datasets, clock, progress)
    while isinstance(result, Rewind):
        progress = go_back(parts, result, reopen_record)
        result = train(parts, datasets_from(progress.state.position), clock, progress, again=True)
    return result


def go_back(parts: TrainingParts, wanted: Rewind, reopen_record: Callable[[int], None]) -> Progress:
    """Load the newest good checkpoint; the progress to go on with. Collective over all ranks.

    `reopen_record`: called on every rank with the iteration that the record goes on from. Raises RewindError when there
    is no such checkpoint, or the run has been back as often as it may.
    """
    most = parts.config.faults.max_rewinds
    if wanted.reached.rewinds >= most:
        raise RewindError(
            f"{wanted.reason}. The run has gone back {wanted.reached.rewinds} times already, and "
            f"faults.max_rewinds={most}. Lower optimizer.lr or optimizer.clip_grad, or look at the data"
        )
    parts.heartbeat.enter(Phase.CHECKPOINT)
    # Times of steps that are undone belong to no record.
    parts.times.take()
    directory = parts.checkpointer.finish_write()
    checkpoint, notes = _newest_good(directory, wanted)
    before = TrainState.from_counters(_counters_on_rank_0(checkpoint))
    state = before.after_rewind(wanted.reached)
    on_rank_0(lambda: _leave_behind(directory, checkpoint, state), parts.device.torch_device)
    reopen_record(state.iteration)
    progress, lost = parts.checkpointer.load(checkpoint, IntervalLoss(parts.device.torch_device), weights_only=False)
    parts.recorder.write(
        "rewind",
        {
            "iteration": state.iteration,
            "from-iteration": wanted.reached.iteration,
            "reason": wanted.reason,
            "checkpoint": str(checkpoint),
            "first skipped sample": before.consumed_samples,
            "last skipped sample": state.consumed_samples - 1,
            "rewinds": state.rewinds,
            "rewinds left": most - state.rewinds,
            "notes": [*notes, *lost],
        },
    )
    # Not as this rank reads the manifest: a file system may still show it the old one.
    return replace(progress, state=state)


def _newest_good(directory: CheckpointDirectory | None, wanted: Rewind) -> tuple[Path, list[str]]:
    """The newest checkpoint that may be taken and is whole, and what is wrong with newer ones. Collective."""
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
    raise RewindError(
        f"{'. '.join([wanted.reason, *notes])}. There is no whole checkpoint of iteration {wanted.newest_iteration} or "
        f"before to go back to: {where}. A smaller checkpoint.save_interval writes one earlier"
    )


def _counters_on_rank_0(checkpoint: Path) -> dict[str, float]:
    """The manifest's counters, before rank 0 changes them."""
    return broadcast(dict(read_manifest(checkpoint).counters) if torch.distributed.get_rank() == 0 else {})


def _leave_behind(directory: CheckpointDirectory | None, checkpoint: Path, state: TrainState) -> None:
    """Set later checkpoints aside, and let this one say where the run goes on."""
    assert directory is not None
    directory.set_aside(state.iteration)
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, replace(manifest, counters={**manifest.counters, **state.as_counters()}))
