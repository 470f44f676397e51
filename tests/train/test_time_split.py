"""Where the time of a step goes: parts that add up, measured by spans that nobody waits for."""

from __future__ import annotations

import time
from dataclasses import astuple

import pytest

from megatron_fp8 import device as devices
from megatron_fp8.train.step_times import (
    BACKWARD,
    DATA,
    FORWARD,
    FORWARD_BACKWARD,
    GRADIENTS,
    OPTIMIZER,
    SCALES,
    RankTimes,
    StepTimes,
    time_series,
)
from tests.checkpoint.training import checkpoint_config, train_on_this_rank
from tests.ranks import run_on_ranks

PARTS = ("batch-generator-time", "forward-backward-time", "all-grads-sync-time", "optimizer-time", "other-time")
OF_SCHEDULE = ("forward", "backward", "waiting")


class Queue:
    """A device that does its work later: each event gets its time when the device comes to it."""

    def __init__(self) -> None:
        self.asked: list[tuple[QueuedEvent | None, float]] = []
        self.now = 0.0
        self.made = 0
        self.waits = 0
        self.ranges: list[str] = []
        self.open: list[str] = []

    def work(self, seconds: float) -> None:
        self.asked.append((None, seconds))

    def run(self) -> None:
        for event, seconds in self.asked:
            self.now += seconds
            if event is not None:
                event.at = self.now
        self.asked.clear()

    def timing_event(self) -> QueuedEvent:
        self.made += 1
        return QueuedEvent(self)

    def range_push(self, name: str) -> None:
        self.open.append(name)
        self.ranges.append("/".join(self.open))

    def range_pop(self) -> None:
        self.open.pop()


class QueuedEvent:
    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.at: float | None = None

    def record(self) -> None:
        self.at = None
        self.queue.asked.append((self, 0.0))

    def query(self) -> bool:
        return self.at is not None

    def synchronize(self) -> None:
        self.queue.waits += 1
        self.queue.run()

    def elapsed_time(self, end_event: QueuedEvent) -> float:
        assert self.at is not None
        assert end_event.at is not None
        return 1e3 * (end_event.at - self.at)


def step(times: StepTimes, queue: Queue, scale: float = 1.0) -> None:
    """A step as Megatron's schedule and the stepper mark it; the seconds of everything are powers of 2."""
    with times.step():
        queue.work(256 * scale)
        times(FORWARD_BACKWARD, log_level=1).start(barrier=False)
        for _ in range(2):
            queue.work(1 * scale)
            times(FORWARD, log_level=2).start()
            with times(DATA):
                queue.work(2 * scale)
            queue.work(4 * scale)
            times(FORWARD).stop()
            times("forward-send", log_level=2).start()
            times("forward-send").stop()
            times(BACKWARD, log_level=2).start()
            queue.work(8 * scale)
            times(BACKWARD).stop()
        with times(GRADIENTS):
            times(GRADIENTS, log_level=1).start()
            queue.work(16 * scale)
            times(GRADIENTS).stop()
            queue.work(32 * scale)
        times(FORWARD_BACKWARD).stop()
        with times(OPTIMIZER):
            queue.work(64 * scale)
            with times(SCALES):
                queue.work(128 * scale)


def test_spans_are_times_of_the_device_and_nobody_waits_for_it() -> None:
    queue = Queue()
    times = StepTimes(queue)  # type: ignore[arg-type]
    step(times, queue)
    assert queue.waits == 0
    queue.run()
    made = queue.made
    step(times, queue, scale=3.0)
    step(times, queue, scale=0.0)
    assert queue.waits == 0
    assert queue.made < 3 * made, "events are used again"
    spans = times.take()
    assert queue.waits == 1
    own = RankTimes.of(spans, whole=4 * 542.0 + 10, num_steps=3)
    each = 4 / 3
    assert astuple(own) == pytest.approx(
        [4 * each, 8 * each, 16 * each, 2 * each, 48 * each, 192 * each, 0, 128 * each, (4 * 542 + 10) / 3, 24 * each]
    )
    assert times.take() == {}


def test_only_training_steps_count_and_an_exception_leaves_nothing_open() -> None:
    queue = Queue()
    times = StepTimes(queue)  # type: ignore[arg-type]
    with times(DATA):
        queue.work(1)

    def fail() -> None:
        with times.step():
            times(FORWARD_BACKWARD).start()
            times(DATA).start()
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert (times.take(), queue.open) == ({}, [])
    step(times, queue)
    assert times.take()[DATA] == 4


def test_ranges_nest_as_the_work_does() -> None:
    queue = Queue()
    times = StepTimes(queue)  # type: ignore[arg-type]
    step(times, queue)
    assert queue.ranges[:5] == [
        "step",
        "step/forward-backward",
        "step/forward-backward/forward-compute",
        "step/forward-backward/forward-compute/batch-generator",
        "step/forward-backward/forward-send",
    ]
    assert queue.open == []


def test_parts_add_up_and_the_slowest_rank_is_the_one_that_computes_longest() -> None:
    ranks = [RankTimes(1, 2, 3, 4, 5, 6, 0.5, 0.25, 30), RankTimes(1, 3, 6, 0, 5, 6, 0.5, 0.25, 32)]
    series = time_series(ranks, fp8=True, several_stages=True)
    assert sum(series[name] for name in PARTS) == pytest.approx(series["iteration-time"]) == 31
    assert (series["compute-time/fastest-rank"], series["compute-time/slowest-rank"]) == (5, 9)
    assert series["slowest-rank"] == 1
    assert series["pipeline-bubble/measured"] == pytest.approx(4 / 18)
    assert not {"optimizer-time/fp8-scale-update", "pipeline-bubble/measured"} & set(time_series(ranks, False, False))


def records_of(tp: int, pp: int, vpp: int | None) -> list[dict]:
    parallel = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    parallel["virtual_pipeline_model_parallel_size"] = vpp
    config = checkpoint_config(
        model={"num_layers": 4}, precision={"mode": "fp8"}, parallel=parallel, training={"global_batch_size": 8}
    )
    return [record for record in train_on_this_rank(config).records if record["event"] == "train"]


@pytest.mark.parametrize(("world", "layout"), [(1, (1, 1, None)), (2, (1, 2, None)), (4, (2, 2, 2))])
def test_parts_of_a_real_run_add_up(world: int, layout: tuple) -> None:
    for record in run_on_ranks(world, records_of, *layout)[0]:
        parts = [record[name] for name in PARTS]
        assert min(parts) > 0, record
        assert sum(parts) == pytest.approx(record["iteration-time"])
        within = [record[f"forward-backward-time/{name}"] for name in OF_SCHEDULE]
        assert min(within) > 0
        assert sum(within) == pytest.approx(record["forward-backward-time"])
        of_optimizer = record["optimizer-time/params-all-gather"] + record["optimizer-time/fp8-scale-update"]
        assert 0 < of_optimizer < record["optimizer-time"]
        assert record["compute-time/fastest-rank"] <= record["compute-time/slowest-rank"] < record["iteration-time"]
        assert 0 <= record["slowest-rank"] < world
        assert record["data-wait-seconds"] >= record["batch-generator-time"]
        bubble = record.get("pipeline-bubble/measured")
        # Stages of ranks that share cores wait for more than each other.
        assert (bubble is None) if layout[1] == 1 else record["pipeline-bubble"] / 2 < bubble < 1
        assert record["pause-seconds"] == pytest.approx(
            record["pause-seconds/evaluate"] + record["pause-seconds/save-checkpoint"]
        )


def test_events_of_the_device_here_are_the_clock_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    times = StepTimes(devices.prepare())
    with times.step(), times(OPTIMIZER):
        now[0] += 2_500_000_000
    assert times.take() == {OPTIMIZER: 2.5}
