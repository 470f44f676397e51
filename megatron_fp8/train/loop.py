"""Owns the training loop: steps, evaluations and checkpoints at intervals, what is recorded when, when it stops.

Straight-line code over parts that were built elsewhere. Must not know how a step computes or where records go.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed
from megatron.core.optimizer import MegatronOptimizer

from megatron_fp8.config.schema import Config
from megatron_fp8.data.dataset import Datasets
from megatron_fp8.data.loader import BatchLoader, MicroBatch
from megatron_fp8.faults.exit_codes import NonFiniteError
from megatron_fp8.faults.signals import StopSignals
from megatron_fp8.precision.overflow import overflow_problem, overflows_in_a_row
from megatron_fp8.train.checkpointing import Progress
from megatron_fp8.train.evaluate import evaluate
from megatron_fp8.train.interval import IntervalLoss
from megatron_fp8.train.pace import Pace
from megatron_fp8.train.parts import TrainingParts
from megatron_fp8.train.state import TrainState
from megatron_fp8.train.step import StepResult
from megatron_fp8.train.throughput import throughput_of


@dataclass(frozen=True)
class TrainResult:
    """First and last validation loss in nats per token, None without evaluation; why the run stopped before its last
    step, None if it did not."""

    first_validation_loss: float | None
    last_validation_loss: float | None
    stopped: str | None


def train(parts: TrainingParts, datasets: Datasets, started: float, progress: Progress | None = None) -> TrainResult:
    """Run the steps that are left; `started` is the job's start on the monotonic clock, in seconds.

    `progress`: where a checkpoint was made; None: at the start.
    """
    training = parts.config.training
    if progress is None:
        progress = Progress(TrainState(), IntervalLoss(parts.device.torch_device), None)
    if progress.state.iteration == 0:
        progress = replace(progress, first_validation_loss=evaluate(parts, datasets.valid, progress.state))
    last = progress.first_validation_loss
    stopped: str | None = None
    with (
        StopSignals(parts.device.torch_device) as signals,
        parts.loader(datasets.train, datasets.num_train_samples, progress.state.consumed_samples) as loader,
    ):
        iterators = loader.iterators(len(parts.chunks))
        pace = Pace(
            training.train_iters - progress.state.iteration,
            training.global_batch_size * parts.config.model.seq_length,
        )
        parts.recorder.write("ready", {"seconds-to-first-step": time.monotonic() - started})
        while progress.state.iteration < training.train_iters and stopped is None:
            progress = _step(parts, iterators, progress, pace, loader)
            if _evaluates_after(parts.config, progress.state.iteration):
                with pace.paused():
                    last = evaluate(parts, datasets.valid, progress.state)
            stopped = _stop_reason(parts.config, progress.state.iteration, signals, started)
            ends = stopped is not None or progress.state.iteration == training.train_iters
            with pace.paused():
                parts.checkpointer.after_step(progress, ends)
    if progress.state.iteration == training.train_iters:
        stopped = None
    parts.recorder.write(
        "end",
        {
            "iteration": progress.state.iteration,
            "lm loss validation at start": progress.first_validation_loss,
            "lm loss validation": last,
            "seconds": time.monotonic() - started,
            "stopped": stopped,
        },
    )
    return TrainResult(progress.first_validation_loss, last, stopped)


def _step(
    parts: TrainingParts,
    iterators: Sequence[Iterator[MicroBatch]],
    progress: Progress,
    pace: Pace,
    loader: BatchLoader,
) -> Progress:
    """One optimizer step and, when it is time, its record."""
    training = parts.config.training
    learning_rate = _learning_rate(parts.optimizer)
    with parts.health.step(progress.state.iteration + 1):
        result = parts.stepper.train(parts.optimizer, iterators, parts.batch_shape)
    if not result.skipped:
        parts.schedule.step(1)
    state = progress.state.after_step(
        training.global_batch_size, parts.config.model.seq_length, result.skipped, _overflows(parts, progress, result)
    )
    _require_progress(parts, result, state)
    progress.interval.add(result)
    pace.step_done()
    if state.iteration % parts.config.logging.log_interval == 0 or state.iteration == training.train_iters:
        _record_interval(parts, state, progress.interval, result, learning_rate, pace, loader.wait_seconds)
    return replace(progress, state=state)


def _stop_reason(config: Config, iteration: int, signals: StopSignals, started: float) -> str | None:
    """Why the run ends after this step, if it does; the same on every rank."""
    settings = config.checkpoint
    minutes = settings.exit_duration_in_mins
    told = signals.vote(also=minutes is not None and time.monotonic() - started >= 60 * minutes)
    if told is None and settings.exit_interval is not None and iteration % settings.exit_interval == 0:
        return f"checkpoint.exit_interval={settings.exit_interval}"
    return told


def _evaluates_after(config: Config, iteration: int) -> bool:
    interval = config.training.eval_interval
    return iteration == config.training.train_iters or (interval > 0 and iteration % interval == 0)


def _record_interval(
    parts: TrainingParts,
    state: TrainState,
    interval: IntervalLoss,
    newest: StepResult,
    learning_rate: float,
    pace: Pace,
    data_wait_seconds: float,
) -> None:
    timing = pace.take_interval(data_wait_seconds)
    peak_memory = parts.device.peak_memory_bytes()
    steps, waits, memory = _of_all_ranks(parts, timing.seconds_per_step, timing.data_wait_seconds, peak_memory)
    # One rank that reads slowly holds all of them up.
    data_wait = max(waits)
    throughput = throughput_of(parts.config, parts.layout, parts.device.description, parts.device.emulated)
    parts.recorder.write(
        "train",
        {
            "iteration": state.iteration,
            "lm loss": _mean_loss(interval, state.iteration),
            "grad-norm": newest.grad_norm,
            "learning-rate": learning_rate,
            "skipped-iterations": state.skipped_iterations,
            **_loss_scale(parts),
            "iteration-time": timing.seconds_per_step,
            "tokens-per-second": timing.tokens_per_second,
            "seconds-left": timing.seconds_left,
            "consumed-samples": state.consumed_samples,
            "consumed-tokens": state.consumed_tokens,
            "data-wait-seconds": data_wait,
            "data-wait-share": data_wait / timing.seconds,
            "peak-memory-bytes": peak_memory,
            "peak-memory-bytes/largest": max(memory),
            "batch-size": parts.config.training.global_batch_size,
            **throughput.series(timing.tokens_per_second),
            "iteration-time/fastest-rank": min(steps),
            "iteration-time/slowest-rank": max(steps),
            "slowest-rank": steps.index(max(steps)),
            "pause-seconds": timing.pause_seconds,
        },
    )


def _of_all_ranks(parts: TrainingParts, *values: float) -> list[list[float]]:
    """Each of `values` as all ranks have it, in their order; one collective over all ranks."""
    own = torch.tensor(values, dtype=torch.float64, device=parts.device.torch_device)
    ranks = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(ranks, own)
    return torch.stack(ranks, dim=1).tolist()


def _loss_scale(parts: TrainingParts) -> dict[str, float]:
    """The scale of the next step's loss, where the mode has one."""
    if parts.precision.policy.loss_scaling is None:
        return {}
    return {"loss-scale": float(parts.optimizer.get_loss_scale())}


def _mean_loss(interval: IntervalLoss, iteration: int) -> float | None:
    """Mean loss over the steps since the last record that were not skipped; collective over all ranks."""
    mean = interval.take()
    if mean is not None and not math.isfinite(mean):
        # Gradients can be finite all the same: those of masked tokens are 0 whatever their loss is.
        raise NonFiniteError(
            f"lm loss is {mean} in the iterations since the last record, up to {iteration}, although their gradients "
            "are finite: the loss of a masked token is not, or all tokens are masked. Look at the data of these steps"
        )
    return mean


def _overflows(parts: TrainingParts, progress: Progress, result: StepResult) -> int:
    scaling = parts.precision.policy.loss_scaling
    if scaling is None:
        return 0
    loss_scale = float(parts.optimizer.get_loss_scale())
    return overflows_in_a_row(progress.state.overflows_in_a_row, result.skipped, loss_scale, scaling)


def _require_progress(parts: TrainingParts, result: StepResult, state: TrainState) -> None:
    """What is asked is the same on all ranks and covers every gradient, so all of them stop at the same step."""
    if result.grad_norm is not None and not math.isfinite(result.grad_norm):
        raise NonFiniteError(
            f"grad-norm is {result.grad_norm} at iteration {state.iteration}: a loss or gradient is not finite. "
            "Lower optimizer.lr, lengthen optimizer.lr_warmup_iters, or look at the data of this step"
        )
    scaling = parts.precision.policy.loss_scaling
    if scaling is None:
        return
    problem = overflow_problem(state.overflows_in_a_row, float(parts.optimizer.get_loss_scale()), scaling)
    if problem is not None:
        raise NonFiniteError(f"stopped at iteration {state.iteration}: {problem}")


def _learning_rate(optimizer: MegatronOptimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])
