"""Owns the training loop: steps, evaluations at intervals, what is recorded when.

Straight-line code over parts that were built elsewhere. Must not know how a step computes or where records go.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.data.dataset import Datasets
from megatron_fp8.data.loader import BatchLoader
from megatron_fp8.data.sampler import BatchSampler
from megatron_fp8.device import Device
from megatron_fp8.faults.exit_codes import NonFiniteError
from megatron_fp8.parallel.groups import ParallelGroups
from megatron_fp8.precision.manager import PrecisionManager
from megatron_fp8.precision.overflow import OverflowWatch
from megatron_fp8.report.record import Recorder
from megatron_fp8.train.health import HealthWatch
from megatron_fp8.train.pace import Pace
from megatron_fp8.train.state import TrainState
from megatron_fp8.train.step import BatchShape, LossSum, Stepper, StepResult


@dataclass(frozen=True)
class TrainingParts:
    """What the loop runs on, this rank's share of it."""

    config: Config
    layout: Layout
    device: Device
    groups: ParallelGroups
    chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    precision: PrecisionManager
    stepper: Stepper
    health: HealthWatch
    recorder: Recorder

    @property
    def needs_data(self) -> bool:
        """Whether this rank's stages look at tokens."""
        return self.groups.is_first_stage or self.groups.is_last_stage

    @property
    def reads_data(self) -> bool:
        """Whether this rank reads samples; rank 0 always can, since it builds the indices."""
        return self.groups.rank == 0 or (self.needs_data and self.groups.tp.rank() == 0)

    @property
    def batch_shape(self) -> BatchShape:
        """Sizes of a step on this rank."""
        return BatchShape(
            self.layout.num_microbatches, self.config.model.seq_length, self.config.training.micro_batch_size
        )

    def loader(self, dataset: object, num_samples: int) -> BatchLoader:
        """Micro-batches of `dataset` from its start."""
        training = self.config.training
        sampler = BatchSampler(
            training.micro_batch_size,
            training.global_batch_size,
            self.groups.dp.rank(),
            self.groups.dp.size(),
        )
        return BatchLoader(
            dataset if self.reads_data else None,  # type: ignore[arg-type]
            sampler,
            self.config.model.seq_length,
            num_samples,
            self.device.torch_device,
            tp_group=self.groups.tp,
            needs_data=self.needs_data,
            num_workers=self.config.data.num_workers,
        )


@dataclass(frozen=True)
class ValidationLosses:
    """First and last validation loss in nats per token; None without evaluation."""

    first: float | None
    last: float | None


def train(parts: TrainingParts, datasets: Datasets, started: float) -> ValidationLosses:
    """Run every step of the config; `started` is the job's start on the monotonic clock, in seconds."""
    training = parts.config.training
    state = TrainState()
    first = last = _evaluate(parts, datasets, state)
    interval: list[StepResult] = []
    loss_scaling = parts.precision.policy.loss_scaling
    overflows = None if loss_scaling is None else OverflowWatch(loss_scaling)
    with parts.loader(datasets.train, datasets.num_train_samples) as loader:
        iterators = loader.iterators(len(parts.chunks))
        pace = Pace(training.train_iters, training.global_batch_size * parts.config.model.seq_length)
        parts.recorder.write("ready", {"seconds-to-first-step": time.monotonic() - started})
        while state.iteration < training.train_iters:
            learning_rate = _learning_rate(parts.optimizer)
            with parts.health.step(state.iteration + 1):
                result = parts.stepper.train(parts.optimizer, iterators, parts.batch_shape)
            if not result.skipped:
                parts.schedule.step(1)
            state = state.after_step(training.global_batch_size, parts.config.model.seq_length, result.skipped)
            _require_progress(parts, overflows, result, state.iteration)
            interval.append(result)
            pace.step_done()
            if state.iteration % parts.config.logging.log_interval == 0 or state.iteration == training.train_iters:
                _record_interval(parts, state, interval, learning_rate, pace, loader.wait_seconds)
                interval.clear()
            if _evaluates_after(parts.config, state.iteration):
                with pace.paused():
                    last = _evaluate(parts, datasets, state)
    parts.recorder.write(
        "end",
        {
            "iteration": state.iteration,
            "lm loss validation at start": first,
            "lm loss validation": last,
            "seconds": time.monotonic() - started,
        },
    )
    return ValidationLosses(first, last)


def _evaluates_after(config: Config, iteration: int) -> bool:
    interval = config.training.eval_interval
    return iteration == config.training.train_iters or (interval > 0 and iteration % interval == 0)


def _evaluate(parts: TrainingParts, datasets: Datasets, state: TrainState) -> float | None:
    """Token-weighted mean loss over the fixed validation set; None if there is none."""
    if parts.config.training.eval_iters == 0:
        return None
    with parts.loader(datasets.valid, datasets.num_valid_samples) as loader:
        iterators = loader.iterators(len(parts.chunks))
        losses = [parts.stepper.evaluate(iterators, parts.batch_shape) for _ in range(parts.config.training.eval_iters)]
    mean = LossSum.total(losses).reduced_mean()
    parts.recorder.write(
        "validation",
        {"iteration": state.iteration, "lm loss validation": mean, "consumed-tokens": state.consumed_tokens},
    )
    return mean


def _record_interval(
    parts: TrainingParts,
    state: TrainState,
    interval: Sequence[StepResult],
    learning_rate: float,
    pace: Pace,
    data_wait_seconds: float,
) -> None:
    timing = pace.take_interval()
    parts.recorder.write(
        "train",
        {
            "iteration": state.iteration,
            "lm loss": _mean_loss(interval, state.iteration),
            "grad-norm": interval[-1].grad_norm,
            "learning-rate": learning_rate,
            "skipped-iterations": state.skipped_iterations,
            **_loss_scale(parts),
            "iteration-time": timing.seconds_per_step,
            "tokens-per-second": timing.tokens_per_second,
            "seconds-left": timing.seconds_left,
            "consumed-samples": state.consumed_samples,
            "consumed-tokens": state.consumed_tokens,
            "data-wait-seconds": data_wait_seconds,
            "peak-memory-bytes": parts.device.peak_memory_bytes(),
        },
    )


def _loss_scale(parts: TrainingParts) -> dict[str, float]:
    """The scale of the next step's loss, where the mode has one."""
    if parts.precision.policy.loss_scaling is None:
        return {}
    return {"loss-scale": float(parts.optimizer.get_loss_scale())}


def _mean_loss(interval: Sequence[StepResult], iteration: int) -> float | None:
    """Mean loss over the steps that were not skipped, None without any; collective over all ranks."""
    counted = [result.loss for result in interval if not result.skipped]
    if not counted:
        return None
    mean = LossSum.total(counted).reduced_mean()
    if not math.isfinite(mean):
        # Gradients can be finite all the same: those of masked tokens are 0 whatever their loss is.
        raise NonFiniteError(
            f"lm loss is {mean} in the {len(interval)} iterations up to {iteration} although their gradients are "
            "finite: the loss of a masked token is not, or all tokens are masked. Look at the data of these steps"
        )
    return mean


def _require_progress(
    parts: TrainingParts, overflows: OverflowWatch | None, result: StepResult, iteration: int
) -> None:
    """What is asked is the same on all ranks and covers every gradient, so all of them stop at the same step."""
    if result.grad_norm is not None and not math.isfinite(result.grad_norm):
        raise NonFiniteError(
            f"grad-norm is {result.grad_norm} at iteration {iteration}: a loss or gradient is not finite. "
            "Lower optimizer.lr, lengthen optimizer.lr_warmup_iters, or look at the data of this step"
        )
    if overflows is None:
        return
    if not result.skipped:
        overflows.effective_step()
        return
    problem = overflows.skipped_step(float(parts.optimizer.get_loss_scale()))
    if problem is not None:
        raise NonFiniteError(f"stopped at iteration {iteration}: {problem}")


def _learning_rate(optimizer: MegatronOptimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])
