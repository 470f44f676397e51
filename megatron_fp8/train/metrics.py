"""Computes what a `train` record says of the steps since the last one: loss, speed, memory, times, over all ranks.

All ranks meet here once per log interval. Must not know when that is, or where records go.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass

import torch
import torch.distributed

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.device import Device
from megatron_fp8.monitors.protocol import Event, Interval, Monitor
from megatron_fp8.planner.flops import flops_per_token
from megatron_fp8.planner.gpus import GPUS, Gpu
from megatron_fp8.planner.pipeline import bubble_share
from megatron_fp8.report.record import Value
from megatron_fp8.train.losses import IntervalLoss
from megatron_fp8.train.state import TrainState
from megatron_fp8.train.step import StepResult
from megatron_fp8.train.step_times import NUM_TIMES, RankTimes, StepTimes, time_series

EVALUATE, SAVE_CHECKPOINT, SAVE_PROFILE = "evaluate", "save-checkpoint", "save-profile"


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


@dataclass(frozen=True)
class IntervalTiming:
    """The steps since the last record, on this rank.

    `seconds`: what the `num_steps` steps together took. `pauses`: seconds that training waited for other work, by what.
    """

    num_steps: int
    num_steps_left: int
    seconds: float
    pauses: Mapping[str, float]


class Pace:
    """Times the steps of a run of `num_steps` steps."""

    def __init__(self, num_steps: int) -> None:
        self._steps_left = num_steps
        self._interval_started = time.perf_counter()
        self._interval_steps = 0
        self._pauses: dict[str, float] = {}

    def step_done(self) -> None:
        """Count a step."""
        self._steps_left -= 1
        self._interval_steps += 1

    @contextmanager
    def paused(self, by: str) -> Iterator[None]:
        """Leave out what happens inside, and count it as a pause."""
        paused_at = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - paused_at
            self._interval_started += seconds
            self._pauses[by] = self._pauses.get(by, 0.0) + seconds

    def take_interval(self) -> IntervalTiming:
        """Timing of the steps since the last call, of which there must be one at least."""
        now = time.perf_counter()
        timing = IntervalTiming(self._interval_steps, self._steps_left, now - self._interval_started, self._pauses)
        self._interval_started, self._interval_steps, self._pauses = now, 0, {}
        return timing


# By words of the name that the driver gives, the first that fits; boards whose peaks are not in the table fit none.
_NAMES = (
    (("H100", "PCIe"), "h100-pcie-80g"),
    (("H100", "NVL"), "h100-nvl-94g"),
    (("H100", "80GB", "HBM3"), "h100-80g"),
    (("A100", "SXM", "40GB"), "a100-40g"),
    (("A100", "SXM", "80GB"), "a100-80g"),
    (("B200",), "b200-180g"),
)


@dataclass(frozen=True)
class Throughput:
    """What turns tokens per second into use of the GPUs. `peak`: FLOP/s of one, None for the reason in `note`."""

    flops_per_token: float
    world_size: int
    peak: float | None
    note: str
    bubble: float

    def series(self, tokens_per_second: float) -> dict[str, float | None]:
        """Per GPU: tokens/s, `throughput` in model TFLOP/s (Megatron's name), MFU; and the pipeline's bubble."""
        tokens = tokens_per_second / self.world_size
        flops = tokens * self.flops_per_token
        return {
            "tokens-per-second-per-gpu": tokens,
            "throughput": flops / 1e12,
            "mfu": None if self.peak is None else flops / self.peak,
            "pipeline-bubble": self.bubble,
        }


def throughput_of(config: Config, layout: Layout, device_name: str, emulated: bool) -> Throughput:
    """Of a run on `layout.world_size` devices called `device_name`; the peak is that of the blocks' GEMMs' format.

    The bubble is that of a schedule whose stages all take equally long, not a measurement.
    """
    gpu = GPUS["cpu"] if emulated else gpu_called(device_name)
    peak = None if gpu is None else gpu.peak_flops(config.precision.mode)
    if gpu is None:
        note = f"withheld: no peak is known for {device_name}"
    elif peak is None:
        note = f"withheld: {gpu.why_unknown(config.precision.mode)}"
    else:
        note = f"share of {peak / 1e12:,.0f} TFLOP/s, the dense {config.precision.mode} peak of {gpu.title}"
    return Throughput(flops_per_token(config, layout).model, layout.world_size, peak, note, bubble_share(layout))


def gpu_called(name: str) -> Gpu | None:
    """The GPU that the driver calls `name` (as `NVIDIA H100 80GB HBM3`), None where the table has no such one."""
    if "H200" in name and "NVL" not in name:
        return GPUS["h200-141g"]
    return next((GPUS[key] for words, key in _NAMES if all(word in name for word in words)), None)
