"""Speed and waiting of the steps between two records."""

import time

import pytest

from megatron_fp8.train.pace import Pace


def test_waiting_is_that_of_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    pace = Pace(num_steps=10, tokens_per_step=32)
    for _ in range(4):
        pace.step_done()
    now[0] += 8
    first = pace.take_interval(data_wait_seconds=0.5)
    assert (first.seconds_per_step, first.tokens_per_second, first.seconds_left) == (2, 16, 12)
    assert (first.data_wait_seconds, first.seconds) == (0.5, 8)
    with pace.paused():
        now[0] += 1000
    pace.step_done()
    now[0] += 3
    second = pace.take_interval(data_wait_seconds=0.75)
    assert (first.pause_seconds, second.pause_seconds) == (0, 1000)
    assert (second.data_wait_seconds, second.seconds, second.seconds_left) == (0.25, 3, 15)
