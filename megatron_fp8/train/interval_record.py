"""Owns what is recorded of the steps since the last record: the series of a `train` record, reduced over all ranks.

One place where all ranks meet, once a log interval. Must not know when it is time, or where records go.
"""

import math

import torch
import torch.distributed

from megatron_fp8.faults.exit_codes import NonFiniteError
from megatron_fp8.train.interval import IntervalLoss
from megatron_fp8.train.pace import Pace
from megatron_fp8.train.parts import TrainingParts
from megatron_fp8.train.state import TrainState
from megatron_fp8.train.step import StepResult
from megatron_fp8.train.throughput import throughput_of


def record_interval(
    parts: TrainingParts,
    state: TrainState,
    interval: IntervalLoss,
    newest: StepResult,
    learning_rate: float,
    pace: Pace,
    data_wait_seconds: float,
) -> None:
    """Write the record of the steps up to `state`; collective over all ranks."""
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
