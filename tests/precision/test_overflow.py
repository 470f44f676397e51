"""Overflows in a row under a loss scale that cannot fall, over a resume too."""

from __future__ import annotations

import pytest

from megatron_fp8.precision.policy import LossScaling
from megatron_fp8.train.state import TrainState

DYNAMIC = LossScaling(constant=None, initial=64.0, minimum=1.0, growth_interval=100, hysteresis=1)
CONSTANT = LossScaling(constant=8.0, initial=8.0, minimum=1.0, growth_interval=100, hysteresis=1)


def counts(script: str, scaling: LossScaling, scales: list[float]) -> list[int]:
    """The count after each step; in the script `x` is a step that was skipped."""
    found, count = [], 0
    for letter, scale in zip(script, scales, strict=True):
        count = scaling.overflows_in_a_row(count, letter == "x", scale)
        found.append(count)
    return found


def test_overflows_count_only_where_the_scale_cannot_fall() -> None:
    assert counts("xxx.xx", DYNAMIC, [4.0, 2.0, 1.0, 1.0, 1.0, 1.0]) == [0, 0, 1, 0, 1, 2]
    assert counts("xx.x", CONSTANT, [8.0] * 4) == [1, 2, 0, 1]


@pytest.mark.parametrize(("scaling", "named"), [(DYNAMIC, "min_loss_scale=1"), (CONSTANT, "loss_scale=8")])
def test_the_tenth_is_told_with_the_key(scaling: LossScaling, named: str) -> None:
    assert scaling.overflow_problem(9, 1.0) is None
    problem = scaling.overflow_problem(10, 1.0)
    assert problem is not None
    assert named in problem
    assert "10 consecutive steps" in problem


def test_a_checkpoint_carries_the_count() -> None:
    state = TrainState().after_step(4, 8, skipped=True, overflows_in_a_row=7)
    assert TrainState.from_counters(state.as_counters()) == state
    older = {name: value for name, value in state.as_counters().items() if name != "overflows_in_a_row"}
    assert TrainState.from_counters(older).overflows_in_a_row == 0
