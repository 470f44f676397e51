"""One training job from a validated config to its end: puts the parts together and takes them down again.

Everything is handed on as an argument; nothing here computes.
"""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed

from megatron_fp8 import device as devices
from megatron_fp8.checkpoint.directory import CHECKPOINTS, CheckpointDirectory
from megatron_fp8.checkpoint.manifest import read_manifest
from megatron_fp8.config.environment import unmet_needs
from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.load import dump_config, process_environment
from megatron_fp8.config.problem import secret_values
from megatron_fp8.config.run_start import LOCK, Start, create_run_directory
from megatron_fp8.config.schema import Config
from megatron_fp8.device import Device
from megatron_fp8.errors import BadInputError
from megatron_fp8.faults.run_lock import Holds
from megatron_fp8.parallel.process_group import init_process_group
from megatron_fp8.report.console import ConsoleSink
from megatron_fp8.report.html import report_at_end
from megatron_fp8.report.library_warnings import hide_meaningless_warnings
from megatron_fp8.report.record import METRICS, Recorder, Sink, Value, drop_records_after
from megatron_fp8.report.start_clock import StartClock
from megatron_fp8.report.views import sinks_of_run
from megatron_fp8.train.start_record import start_record


@dataclass(frozen=True)
class JobSummary:
    """What a finished job reports. Losses in nats per token; None without evaluation."""

    run_directory: Path | None
    first_validation_loss: float | None
    last_validation_loss: float | None
    seconds: float
    stopped: str | None


def run_job(
    config: Config, vocab_size: int, start: Start, holds: Holds, clock: StartClock, quiet: bool = False
) -> JobSummary:
    """Train as `config`, already checked, says; `vocab_size` is that of the tokenizer, before padding.

    `start`: what the run starts from; on rank 0 that counts, and so does its config. `holds`: what rank 0 has kept from
    being changed since it chose. `clock`: started with the program. `quiet`: warnings and errors only.

    Every rank of the job calls this. Raises what the parts raise; `run_directory` is None on ranks that write none.
    """
    device = devices.prepare()
    hide_meaningless_warnings(device.emulated)
    # They look for CUDA when imported.
    from megatron_fp8.checkpoint.rank_io import verified_start
    from megatron_fp8.data.dataset import build_datasets
    from megatron_fp8.data.tokenizer import Tokenizer
    from megatron_fp8.monitors.liveness import explaining_lost_ranks, watched
    from megatron_fp8.monitors.profiler import PROFILES
    from megatron_fp8.parallel.object_collectives import broadcast
    from megatron_fp8.train.rollback import train_to_the_end
    from megatron_fp8.train.setup import build_parts
    from megatron_fp8.train.step import IntervalLoss

    clock.end_part("import")
    init_process_group(device.backend(config.parallel.distributed_backend), config.parallel.distributed_timeout_minutes)
    config, start = broadcast((config, start))  # rank 0 alone chose, holding the run's lock
    warn_of_unmet_needs(config, device, process_environment(), torch.distributed.get_rank())
    layout = derive_layout(config, torch.distributed.get_world_size(), vocab_size)
    start, notes = verified_start(start, config)
    if start.is_finished(config.training.train_iters):
        return _nothing_left(config, start, clock)
    with ExitStack() as stack:
        run_directory, recorder = _open_run(config, start, holds, quiet)
        if run_directory is not None:
            stack.callback(report_at_end, run_directory)  # once the record is closed, whatever ended the run
        stack.callback(recorder.close)
        stack.push(partial(_record_failure, recorder))
        # Only rank 0 knows its final name; all ranks write checkpoints and profiles into it.
        everywhere = Path(broadcast(str(run_directory)))
        checkpoints = everywhere / CHECKPOINTS if config.checkpoint.save else None
        clock.end_part("environment")
        parts = build_parts(config, layout, vocab_size, device, recorder, checkpoints, everywhere / PROFILES)
        stack.enter_context(watched(config, device, parts.heartbeat, recorder, run_directory))
        stack.enter_context(explaining_lost_ranks(parts.heartbeat, config.parallel.distributed_timeout_minutes))
        clock.end_part("model")
        datasets_from = partial(build_datasets, config, Tokenizer.of(config.data), parts.batches.reads_data)
        datasets = datasets_from(start.position)
        clock.end_part("data")
        recorder.write("start", start_record(config, layout, device, run_directory))
        progress = None
        if start.checkpoint is not None:
            interval = IntervalLoss(device.torch_device)
            progress, lost = parts.checkpointer.load(start.checkpoint, interval, start.weights_only)
            torch.distributed.barrier()  # not before every rank has loaded
            holds.let_checkpoint_go()
            recorder.write("resume", _resumed(start, progress.state.iteration, [*notes, *lost]))
            clock.end_part("checkpoint")
        reopen = partial(_reopen_record, config, run_directory, recorder, quiet)
        result = train_to_the_end(parts, datasets, clock, progress, datasets_from, reopen)
    # Not after an exception: other ranks may still be in a collective, for which this would wait.
    torch.distributed.destroy_process_group()
    losses = result.first_validation_loss, result.last_validation_loss
    return JobSummary(run_directory, *losses, clock.seconds, result.stopped)


def warn_of_unmet_needs(config: Config, device: Device, environ: Mapping[str, str], rank: int) -> None:
    """On rank 0 of a job on GPUs: each variable that its layout needs and that is missing, on standard error.

    Later than the check of the config, since which GPUs there are is only known here. CPUs need none.
    """
    if rank != 0 or device.emulated:
        return
    for problem in unmet_needs(config.parallel, environ, device.compute_capability()):
        print(f"warning: {problem}", file=sys.stderr, flush=True)


def _open_run(config: Config, start: Start, holds: Holds, quiet: bool) -> tuple[Path | None, Recorder]:
    if torch.distributed.get_rank() != 0:
        return None, Recorder([])
    run_directory = start.run_directory
    iteration = 0
    goes_on_from = None
    if run_directory is None:
        run_directory = create_run_directory(config)
    holds.run(run_directory)
    _require_as_chosen(start, run_directory)
    if start.run_directory is not None:
        checkpoints = CheckpointDirectory(run_directory / CHECKPOINTS)
        checkpoints.sweep()
        if start.checkpoint is not None:
            iteration = read_manifest(start.checkpoint).iteration
            checkpoints.set_aside(iteration)
        # Without a checkpoint even the evaluation before the first step is made again.
        drop_records_after(run_directory / METRICS, iteration if start.checkpoint is not None else -1)
        goes_on_from = iteration
    (run_directory / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    sinks = _sinks(config, run_directory, quiet, goes_on_from)
    return run_directory, Recorder(sinks, secret_values(process_environment()))


def _require_as_chosen(start: Start, run_directory: Path) -> None:
    """Nothing in the directory is newer than the choice. The lock sees to that, where the disk has locks."""
    known = -1 if start.newest is None else start.newest
    newer = [i for i in CheckpointDirectory(run_directory / CHECKPOINTS).iterations() if i > known]
    begun = start.run_directory is None and any(path.name != LOCK for path in run_directory.iterdir())
    if newer or begun:
        what = f"has written iteration {newer[-1]}" if newer else "has begun a run"
        raise BadInputError(
            f"another job {what} in {run_directory} since this one looked for a checkpoint\n    use: --resume=auto"
        )


def _nothing_left(config: Config, start: Start, clock: StartClock) -> JobSummary:
    """The end of a job whose run has been finished before."""
    if torch.distributed.get_rank() == 0:
        print(start.finished(config.training.train_iters), flush=True)
    torch.distributed.destroy_process_group()
    return JobSummary(start.run_directory, None, None, clock.seconds, None)


def _sinks(config: Config, run_directory: Path, quiet: bool, goes_on_from: int | None) -> list[Sink]:
    log = run_directory / "console.log"
    console = partial(ConsoleSink, log, config.training.train_iters, goes_on_from or 0, quiet)
    return sinks_of_run(config, run_directory, console, goes_on_from)


def _reopen_record(config: Config, run_directory: Path | None, recorder: Recorder, quiet: bool, iteration: int) -> None:
    """The record and its views as a run that resumes at `iteration` opens them."""
    if run_directory is None:
        return
    recorder.close()
    drop_records_after(run_directory / METRICS, iteration)
    recorder.reopen(_sinks(config, run_directory, quiet, iteration))


def _record_failure(
    recorder: Recorder, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
) -> None:
    """What ends the job on this rank, for the dashboards; the exception goes on."""
    if kind is not None:
        recorder.write("failure", {"kind": kind.__name__, "error": str(error)})


def _resumed(start: Start, iteration: int, notes: list[str]) -> dict[str, Value]:
    return {
        "checkpoint": str(start.checkpoint),
        "iteration": iteration,
        "weights only": start.weights_only,
        "notes": [*start.notes, *notes],
    }
