"""The clock of the training loop: steps of an interval, and pauses by what they were for."""

import time

import pytest

from megatron_fp8.train.state import EVALUATE, SAVE_CHECKPOINT, Pace


def test_pauses_are_no_part_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    pace = Pace(num_steps=10)
    for _ in range(4):
        pace.step_done()
    now[0] += 8
    first = pace.take_interval()
    assert (first.num_steps, first.num_steps_left, first.seconds, first.pauses) == (4, 6, 8, {})
    for by, seconds in ((EVALUATE, 1000), (SAVE_CHECKPOINT, 100), (EVALUATE, 1)):
        with pace.paused(by):
            now[0] += seconds
    pace.step_done()
    now[0] += 3
    second = pace.take_interval()
    assert (second.num_steps, second.num_steps_left, second.seconds) == (1, 5, 3)
    assert second.pauses == {EVALUATE: 1001, SAVE_CHECKPOINT: 100}
