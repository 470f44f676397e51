"""Computes what a `train` record says of the steps since the last one: loss, speed, memory, times, over all ranks.

All ranks meet here once per log interval. Must not know when that is, or where records go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple

import torch
import torch.distributed

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.device import Device
from megatron_fp8.monitors.protocol import Event, Interval, Monitor
from megatron_fp8.planner.throughput import throughput_of
from megatron_fp8.report.record import Value
from megatron_fp8.train.state import EVALUATE, SAVE_CHECKPOINT, Pace, TrainState
from megatron_fp8.train.step import IntervalLoss, StepResult
from megatron_fp8.train.step_times import NUM_TIMES, RankTimes, StepTimes, time_series


class IntervalMetrics:
    """Makes the `train` records of a run."""

    def __init__(
        self, config: Config, layout: Layout, device: Device, times: StepTimes, monitors: Sequence[Monitor]
    ) -> None:
        self._fp8 = config.precision.mode == "fp8"
        self._global_batch_size = config.training.global_batch_size
        self._layout = layout
        self._device = device
        self._times = times
        self._monitors = monitors
        self._throughput = throughput_of(config, layout, device.description, device.emulated)

    def take(
        self,
        state: TrainState,
        interval: IntervalLoss,
        newest: StepResult,
        learning_rate: float,
        loss_scale: float | None,
        pace: Pace,
    ) -> Iterator[Event]:
        """The records of the steps up to `state`; collective over all ranks.

        `loss_scale`: that of the next step, None where the mode has none.
        """
        # First, since it waits for the device: then all work that the steps enqueued is done before the clock is read.
        spans = self._times.take()
        timing = pace.take_interval()
        peak_memory = self._device.peak_memory_bytes()
        memory, times, of_monitors = self._all_ranks(
            peak_memory, RankTimes.of(spans, timing.seconds, timing.num_steps), state.iteration
        )
        for monitor, each in zip(self._monitors, of_monitors, strict=True):
            yield from monitor.on_interval(each)
        split = time_series(times, self._fp8, self._layout.pipeline_model_parallel_size > 1)
        seconds_per_step = split["iteration-time"]
        tokens_per_second = self._layout.tokens_per_global_batch / seconds_per_step
        # One rank that reads slowly holds all of them up.
        data_wait = max(rank.data for rank in times)
        loss = interval.take()
        if loss.any_step and loss.mean is None:
            yield "no-loss", {"iteration": state.iteration, "of": "training", "sets": []}
        record: dict[str, Value] = {
            "iteration": state.iteration,
            "lm loss": loss.mean,
            "grad-norm": newest.grad_norm,
            "learning-rate": learning_rate,
            "skipped-iterations": state.skipped_iterations,
            **({} if loss_scale is None else {"loss-scale": loss_scale}),
            "tokens-per-second": tokens_per_second,
            "seconds-left": seconds_per_step * timing.num_steps_left,
            "consumed-samples": state.consumed_samples,
            "consumed-tokens": state.consumed_tokens,
            "data-wait-seconds": data_wait * timing.num_steps,
            "data-wait-share": data_wait / seconds_per_step,
            "peak-memory-bytes": peak_memory,
            "peak-memory-bytes/largest": max(memory),
            "batch-size": self._global_batch_size,
            **self._throughput.series(tokens_per_second),
            **split,
            **_pauses(timing.pauses),
        }
        for monitor, each in zip(self._monitors, of_monitors, strict=True):
            record |= monitor.interval_values(each)
        yield "train", record

    def _all_ranks(
        self, memory: float, times: RankTimes, iteration: int
    ) -> tuple[list[float], list[RankTimes], list[Interval]]:
        """Peak memory and times of each rank in their order, and each monitor's interval, by one collective."""
        local = [list(monitor.local_values()) for monitor in self._monitors]
        values = [memory, *astuple(times), *(value for each in local for value in each)]
        own = torch.tensor(values, dtype=torch.float64, device=self._device.torch_device)
        ranks = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(ranks, own)
        rows = torch.stack(ranks).tolist()
        end = 1 + NUM_TIMES
        all_times = [RankTimes(*row[1:end]) for row in rows]
        intervals = []
        for each in local:
            start, end = end, end + len(each)
            intervals.append(Interval(iteration, all_times, [row[start:end] for row in rows]))
        return [row[0] for row in rows], all_times, intervals


def _pauses(seconds: Mapping[str, float]) -> dict[str, float]:
    """How long training waited since the last record, and for what."""
    return {
        "pause-seconds": sum(seconds.values()),
        **{f"pause-seconds/{name}": each for name, each in {EVALUATE: 0.0, SAVE_CHECKPOINT: 0.0, **seconds}.items()},
    }
