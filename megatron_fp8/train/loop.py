"""The training loop: steps, evaluations and checkpoints at intervals, what is recorded when, when it stops.

Straight-line code over parts that were built elsewhere. Must not know how a step computes, what a record of steps
holds, or where records go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from megatron_fp8.config.schema import Config
from megatron_fp8.data.dataset import Datasets
from megatron_fp8.data.loader import MicroBatch
from megatron_fp8.faults.exit_codes import NonFiniteError
from megatron_fp8.faults.signals import StopSignals
from megatron_fp8.monitors.heartbeat import Phase
from megatron_fp8.monitors.nonfinite import Rollback
from megatron_fp8.monitors.protocol import Event
from megatron_fp8.report.start_clock import StartClock
from megatron_fp8.train.checkpointing import Progress
from megatron_fp8.train.evaluate import evaluate
from megatron_fp8.train.setup import TrainingParts
from megatron_fp8.train.state import EVALUATE, SAVE_CHECKPOINT, SAVE_PROFILE, Pace, TrainState
from megatron_fp8.train.step import IntervalLoss, StepResult


@dataclass(frozen=True)
class TrainResult:
    """Validation loss before the first step, and the last one after a step of this job, in nats per token, None without
    evaluation; why the run stopped before its last step, None if it did not."""

    first_validation_loss: float | None
    last_validation_loss: float | None
    stopped: str | None


def train(
    parts: TrainingParts,
    datasets: Datasets,
    clock: StartClock,
    progress: Progress | None = None,
    rolled_back: bool = False,
) -> TrainResult | Rollback:
    """Run the steps that are left, or those up to one after which the run has to roll back to a checkpoint.

    `clock`: of the job. `progress`: of a checkpoint; None: from scratch.
    `rolled_back`: this job has trained before.
    """
    train_iters = parts.config.training.train_iters
    if progress is None:
        progress = Progress(TrainState(), IntervalLoss(parts.device.torch_device), None)
    if progress.state.iteration == 0:
        progress = replace(progress, first_validation_loss=_evaluate(parts, datasets, progress.state))
        clock.end_part("evaluation")
    last: float | None = None
    stopped: str | None = None
    with (
        StopSignals(parts.device.torch_device) as signals,
        parts.batches.loader(datasets.train, datasets.num_train_samples, progress.state.consumed_samples) as loader,
    ):
        iterators = loader.iterators(len(parts.chunks))
        pace = Pace(train_iters - progress.state.iteration)
        clock.end_part("data")
        if not rolled_back:
            parts.recorder.write("ready", {"seconds-to-first-step": clock.seconds})
        _profile(parts, progress.state.iteration, pace)
        while progress.state.iteration < train_iters and stopped is None:
            outcome = _step(parts, iterators, progress, pace)
            if isinstance(outcome, Rollback):
                _profile(parts, progress.state.iteration, pace, ends=True)
                return outcome
            progress = outcome
            if (startup := clock.end("first-step")) is not None:
                parts.recorder.write("startup", {"iteration": progress.state.iteration, **startup})
            _profile(parts, progress.state.iteration, pace)
            if _evaluates_after(parts.config, progress.state.iteration):
                with pace.paused(EVALUATE):
                    last = _evaluate(parts, datasets, progress.state)
            stopped = _stop_reason(parts.config, progress.state.iteration, signals, clock)
            ends = stopped is not None or progress.state.iteration == train_iters
            parts.heartbeat.enter(Phase.CHECKPOINT)
            with pace.paused(SAVE_CHECKPOINT):
                parts.checkpointer.after_step(progress, ends)
        _profile(parts, progress.state.iteration, pace, ends=True)
    if progress.state.iteration == train_iters:
        stopped = None
    parts.recorder.write(
        "end",
        {
            "iteration": progress.state.iteration,
            "lm loss validation at start": progress.first_validation_loss,
            "lm loss validation": last,
            "seconds": clock.seconds,
            "stopped": stopped,
        },
    )
    return TrainResult(progress.first_validation_loss, last, stopped)


def _step(
    parts: TrainingParts, iterators: Sequence[Iterator[MicroBatch]], progress: Progress, pace: Pace
) -> Progress | Rollback:
    """One optimizer step and, when it is time, its record."""
    training, iteration = parts.config.training, progress.state.iteration + 1
    parts.heartbeat.enter(Phase.FORWARD_BACKWARD, iteration)
    learning_rate = float(parts.optimizer.param_groups[0]["lr"])

    def before_update() -> None:
        for monitor in parts.monitors:
            monitor.before_update(iteration)

    with ExitStack() as around:
        for monitor in parts.monitors:
            around.enter_context(monitor.before_step(iteration))
        result = parts.stepper.train(parts.optimizer, iterators, parts.batches.shape, before_update)
    if not result.skipped:
        parts.schedule.step(1)
    state = progress.state.after_step(
        training.global_batch_size,
        parts.config.model.seq_length,
        result.skipped,
        _overflows(parts, progress, result),
        result.nonfinite,
    )
    _require_progress(parts, state)
    for monitor in parts.monitors:
        _record(parts, monitor.after_step(iteration, not result.skipped))
    verdict = parts.judge.judge(progress.recent, state, result)
    if verdict.event is not None:
        _record(parts, [verdict.event])
    if verdict.rollback is not None:
        return verdict.rollback
    if not result.skipped:
        progress.interval.add(result.loss)
    pace.step_done()
    parts.heartbeat.step_done()
    if iteration % parts.config.logging.log_interval == 0 or iteration == training.train_iters:
        loss_scale = _loss_scale(parts)
        _record(parts, parts.metrics.take(state, progress.interval, result, learning_rate, loss_scale, pace))
    return replace(progress, state=state)


def _record(parts: TrainingParts, events: Iterable[Event]) -> None:
    for event, values in events:
        parts.recorder.write(event, values)


def _evaluate(parts: TrainingParts, datasets: Datasets, state: TrainState) -> float | None:
    """The total validation loss, recorded with each set's own."""
    parts.heartbeat.enter(Phase.EVALUATION)
    loss, events = evaluate(parts.stepper, parts.batches, datasets.valid, state)
    _record(parts, events)
    return loss


def _profile(parts: TrainingParts, iteration: int, pace: Pace, ends: bool = False) -> None:
    """Begin or end the trace when it is time."""
    if parts.profiler.is_due(iteration, ends):
        parts.heartbeat.enter(Phase.PROFILE)
        with pace.paused(SAVE_PROFILE):
            _record(parts, parts.profiler.change(iteration))


def _stop_reason(config: Config, iteration: int, signals: StopSignals, clock: StartClock) -> str | None:
    """Why the run ends after this step, if it does; the same on every rank."""
    settings = config.checkpoint
    minutes = settings.exit_duration_in_mins
    told = signals.vote(also=minutes is not None and clock.seconds >= 60 * minutes)
    if told is None and settings.exit_interval is not None and iteration % settings.exit_interval == 0:
        return f"checkpoint.exit_interval={settings.exit_interval}"
    return told


def _evaluates_after(config: Config, iteration: int) -> bool:
    interval = config.training.eval_interval
    return iteration == config.training.train_iters or (interval > 0 and iteration % interval == 0)


def _overflows(parts: TrainingParts, progress: Progress, result: StepResult) -> int:
    scaling = parts.precision.policy.loss_scaling
    # The scale is on the device, which nobody waits for after a step that went well.
    if scaling is None or not result.skipped:
        return 0
    loss_scale = float(parts.optimizer.get_loss_scale())
    return scaling.overflows_in_a_row(progress.state.overflows_in_a_row, result.skipped, loss_scale)


def _require_progress(parts: TrainingParts, state: TrainState) -> None:
    """What is asked is the same on all ranks, so all of them stop at the same step."""
    scaling = parts.precision.policy.loss_scaling
    if scaling is None or state.overflows_in_a_row == 0:
        return
    problem = scaling.overflow_problem(state.overflows_in_a_row, float(parts.optimizer.get_loss_scale()))
    if problem is not None:
        raise NonFiniteError(f"stopped at iteration {state.iteration}: {problem}")


def _loss_scale(parts: TrainingParts) -> float | None:
    """The scale of the next step's loss, None where the mode has none."""
    return None if parts.precision.policy.loss_scaling is None else float(parts.optimizer.get_loss_scale())
