"""Owns what is recorded of the steps since the last record: the series of a `train` record, reduced over all ranks.

One place where all ranks meet, once a log interval. Must not know when it is time, or where records go.
"""

from collections.abc import Mapping

import torch
import torch.distributed

from megatron_fp8.train.interval import IntervalLoss
from megatron_fp8.train.node_watch import NodeReading, node_series
from megatron_fp8.train.pace import EVALUATE, SAVE_CHECKPOINT, Pace
from megatron_fp8.train.parts import TrainingParts
from megatron_fp8.train.state import TrainState
from megatron_fp8.train.step import StepResult
from megatron_fp8.train.throughput import throughput_of
from megatron_fp8.train.time_split import RankTimes, time_series


def record_interval(
    parts: TrainingParts,
    state: TrainState,
    interval: IntervalLoss,
    newest: StepResult,
    learning_rate: float,
    pace: Pace,
) -> None:
    """Write the record of the steps up to `state`; collective over all ranks."""
    # First, since it waits for the device: then all that the steps asked for lies before the clock's reading.
    spans = parts.times.take()
    timing = pace.take_interval()
    peak_memory = parts.device.peak_memory_bytes()
    own = RankTimes.of(spans, timing.seconds, timing.num_steps)
    memory, times, nodes = _of_all_ranks(parts, peak_memory, own)
    parts.slow_ranks.add(state.iteration, times)
    split = time_series(times, parts.precision.policy.fp8 is not None, parts.groups.pp.size() > 1)
    seconds_per_step = split["iteration-time"]
    tokens_per_second = parts.layout.tokens_per_global_batch / seconds_per_step
    throughput = throughput_of(parts.config, parts.layout, parts.device.description, parts.device.emulated)
    # One rank that reads slowly holds all of them up.
    data_wait = max(rank.data for rank in times)
    loss = interval.take()
    if loss.any_step and loss.mean is None:
        parts.recorder.write("no-loss", {"iteration": state.iteration, "of": "training", "sets": []})
    parts.recorder.write(
        "train",
        {
            "iteration": state.iteration,
            "lm loss": loss.mean,
            "grad-norm": newest.grad_norm,
            "learning-rate": learning_rate,
            "skipped-iterations": state.skipped_iterations,
            **_loss_scale(parts),
            "tokens-per-second": tokens_per_second,
            "seconds-left": seconds_per_step * timing.num_steps_left,
            "consumed-samples": state.consumed_samples,
            "consumed-tokens": state.consumed_tokens,
            "data-wait-seconds": data_wait * timing.num_steps,
            "data-wait-share": data_wait / seconds_per_step,
            "peak-memory-bytes": peak_memory,
            "peak-memory-bytes/largest": max(memory),
            "batch-size": parts.config.training.global_batch_size,
            **throughput.series(tokens_per_second),
            **split,
            **_pauses(timing.pauses),
            **node_series(nodes),
        },
    )


def _of_all_ranks(
    parts: TrainingParts, memory: float, times: RankTimes
) -> tuple[list[float], list[RankTimes], list[NodeReading]]:
    """Peak memory and times of each rank in their order, and readings of each node; one collective over all ranks."""
    values = [memory, *times.values(), float(parts.node.reads), *parts.node.read().values()]
    own = torch.tensor(values, dtype=torch.float64, device=parts.device.torch_device)
    ranks = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(ranks, own)
    rows = torch.stack(ranks).tolist()
    end = 1 + len(times.values())
    return (
        [row[0] for row in rows],
        [RankTimes(*row[1:end]) for row in rows],
        [NodeReading(*row[end + 1 :]) for row in rows if row[end]],
    )


def _pauses(seconds: Mapping[str, float]) -> dict[str, float]:
    """How long training waited since the last record, and for what."""
    return {
        "pause-seconds": sum(seconds.values()),
        **{f"pause-seconds/{name}": each for name, each in {EVALUATE: 0.0, SAVE_CHECKPOINT: 0.0, **seconds}.items()},
    }


def _loss_scale(parts: TrainingParts) -> dict[str, float]:
    """The scale of the next step's loss, where the mode has one."""
    if parts.precision.policy.loss_scaling is None:
        return {}
    return {"loss-scale": float(parts.optimizer.get_loss_scale())}
