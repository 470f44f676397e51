"""Writes a run's checkpoints when it is time, records them, and resumes from one.

Must not know what a checkpoint holds or how it is written.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.checkpoint.live import LiveState
from megatron_fp8.checkpoint.manifest import Manifest, read_manifest
from megatron_fp8.checkpoint.rank_io import on_rank_0
from megatron_fp8.checkpoint.save import CheckpointWriter, SavedCheckpoint
from megatron_fp8.config.layout import Layout
from megatron_fp8.config.load import dump_config
from megatron_fp8.config.schema import Config
from megatron_fp8.monitors.fp8_health import Fp8HealthMonitor
from megatron_fp8.monitors.spike import RecentLosses
from megatron_fp8.precision.policy import FALLBACK_LISTS
from megatron_fp8.report.code_version import versions
from megatron_fp8.report.record import Recorder
from megatron_fp8.train.state import TrainState
from megatron_fp8.train.step import IntervalLoss

_INTERVAL = "interval_loss"


@dataclass(frozen=True)
class Progress:
    """Where a run is: its counters, the losses not recorded yet, the first validation loss in nats per token.

    `recent`: what says whether the next loss is a spike.
    """

    state: TrainState
    interval: IntervalLoss
    first_validation_loss: float | None
    recent: RecentLosses = field(default_factory=RecentLosses)


class Checkpointer:
    """Saves a run's progress into `directory` (None: nowhere) and loads it."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        directory: Path | None,
        live: LiveState,
        health: Fp8HealthMonitor,
        recorder: Recorder,
    ) -> None:
        self._config = config
        self._layout = layout
        self.live = live
        self._health = health
        self._recorder = recorder
        self._directory = CheckpointDirectory(directory) if directory is not None else None
        self._writer = CheckpointWriter(self._directory, live) if self._directory is not None else None
        self._saved_iteration = 0

    def load(self, checkpoint: Path, interval: IntervalLoss, weights_only: bool) -> tuple[Progress, list[str]]:
        """Take over a checkpoint whose files are whole; the progress, and what could not be carried over as it was."""
        manifest = read_manifest(checkpoint)
        notes = self.live.load(checkpoint, manifest.counters, weights_only)
        if weights_only:
            return Progress(TrainState(), interval, None), notes
        sums = self.live.load_own(checkpoint, _INTERVAL)
        if sums is not None:
            interval.restore(sums)
        fallback = {name: manifest.lists[name] for name in FALLBACK_LISTS if name in manifest.lists}
        self._health.load_state_dict(fallback)
        self._saved_iteration = manifest.iteration
        first = manifest.counters.get("first_validation_loss")
        recent = RecentLosses.from_lists(manifest.lists)
        return Progress(TrainState.from_counters(manifest.counters), interval, first, recent), notes

    def finish_write(self) -> CheckpointDirectory | None:
        """Wait for the write that is going on; the directory of the run's checkpoints, None where none are written.

        Collective over all ranks.
        """
        if self._writer is not None:
            self._record(self._writer.wait())
        return self._directory

    def after_step(self, progress: Progress, stops: bool) -> None:
        """Save when it is time, or when the run `stops` after this step; look after the write that is going on."""
        if self._writer is None:
            return
        self._record(self._writer.poll())
        interval = self._config.checkpoint.save_interval
        iteration = progress.state.iteration
        due = stops or (interval > 0 and iteration % interval == 0)
        if not due or iteration == self._saved_iteration:
            return
        self._record(self._writer.wait())
        self._writer.start(self._manifest(progress), {_INTERVAL: progress.interval.state()})
        self._saved_iteration = iteration
        if stops or not self._config.checkpoint.async_save:
            self._record(self._writer.wait())

    def _manifest(self, progress: Progress) -> Manifest:
        counters: dict[str, float] = {**progress.state.as_counters(), **self.live.scalars()}
        if progress.first_validation_loss is not None:
            counters["first_validation_loss"] = progress.first_validation_loss
        layout = self._layout
        return Manifest(
            iteration=progress.state.iteration,
            config=dump_config(self._config),
            layout={
                "world_size": layout.world_size,
                "tensor_model_parallel_size": layout.tensor_model_parallel_size,
                "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
                "data_parallel_size": layout.data_parallel_size,
            },
            counters=counters,
            lists={**self._health.state_dict(), **progress.recent.as_lists()},
            versions=versions(),
            written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    def _record(self, saved: SavedCheckpoint | None) -> None:
        if saved is None or self._directory is None:
            return
        settings, directory = self._config.checkpoint, self._directory
        removed: list[int] = []
        on_rank_0(lambda: removed.extend(directory.prune(settings.keep_last, settings.save_retain_interval)))
        self._recorder.write(
            "checkpoint",
            {
                "iteration": saved.iteration,
                "path": str(saved.path),
                "bytes": saved.num_bytes,
                "hold-up-seconds": saved.hold_up_seconds,
                "seconds": saved.seconds,
                "removed": removed,
            },
        )
