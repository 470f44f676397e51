"""The decision to leave FP8: N checks in a row, not N in total, and back after M healthy ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8.precision.fallback import Change, FallbackDecider, worst_excess
from megatron_fp8.precision.policy import HealthPolicy
from megatron_fp8.precision.tensor_health import TensorHealth

POLICY = HealthPolicy(
    interval=10,
    fallback=True,
    num_checks=3,
    num_healthy_checks=2,
    max_clipped=0.01,
    max_flushed=0.5,
    max_error=0.2,
)
GOOD = TensorHealth(clipped=0.01, flushed=0.5, error=0.2)
BAD = TensorHealth(clipped=0.02, flushed=0.0, error=0.0)


def run(decider: FallbackDecider, checks: str, layer: int = 0) -> list[list[Change]]:
    """One check a letter: `b`ad or `g`ood."""
    return [decider.check({layer: {"layers.0/x/input": BAD if check == "b" else GOOD}}) for check in checks]


def first_run(checks: str, bad: str, length: int) -> int | None:
    """Index at which `length` equal letters in a row are first complete."""
    place = checks.find(bad * length)
    return None if place < 0 else place + length - 1


@given(st.text("gb", max_size=30), st.integers(1, 4))
def test_it_falls_back_at_the_end_of_the_first_run_of_bad_checks(checks: str, num_checks: int) -> None:
    decider = FallbackDecider(replace(POLICY, num_checks=num_checks, num_healthy_checks=0))
    changes = run(decider, checks)
    place = first_run(checks, "b", num_checks)
    assert [index for index, found in enumerate(changes) if found] == ([] if place is None else [place])
    assert decider.fallen_back == (frozenset() if place is None else {0})


@given(st.text("gb", max_size=40), st.integers(1, 3), st.integers(1, 3))
def test_it_goes_back_and_forth_by_runs(checks: str, num_checks: int, num_healthy: int) -> None:
    decider = FallbackDecider(replace(POLICY, num_checks=num_checks, num_healthy_checks=num_healthy))
    changes = [index for index, found in enumerate(run(decider, checks)) if found]
    expected, start, fallen = [], 0, False
    while True:
        letter, length = ("g", num_healthy) if fallen else ("b", num_checks)
        place = first_run(checks[start:], letter, length)
        if place is None:
            break
        expected.append(start + place)
        start, fallen = expected[-1] + 1, not fallen
    assert changes == expected


def test_layers_are_counted_apart_and_an_unchecked_layer_keeps_its_count() -> None:
    decider = FallbackDecider(POLICY)
    run(decider, "bb", layer=1)
    run(decider, "bgb", layer=2)
    assert not decider.fallen_back
    (change,) = decider.check({1: {"layers.1/x/input": BAD}})
    assert (change.layer, decider.fallen_back) == (1, {1})


def test_one_bad_tensor_is_enough_and_is_named() -> None:
    decider = FallbackDecider(replace(POLICY, num_checks=1))
    tensors = {"a": GOOD, "b": TensorHealth(0.0, 0.9, 0.0), "c": TensorHealth(0.0, 0.0, 0.9)}
    (change,) = decider.check({4: tensors})
    assert change.reason is not None
    # 4.5 times its limit, against 1.8 times.
    assert (change.reason.tensor, change.reason.quantity) == ("c", "error")
    assert (change.reason.value, change.reason.limit) == (0.9, 0.2)


def test_nan_is_over_every_limit_and_a_limit_itself_is_not() -> None:
    assert worst_excess({"a": TensorHealth(0.0, 0.0, math.nan)}, replace(POLICY, max_error=1e9)) is not None
    assert worst_excess({"a": GOOD}, POLICY) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20), st.integers(0, 20))
def test_a_state_that_went_through_json_goes_on_alike(checks: list[tuple[int, bool]], cut: int) -> None:
    def apply(decider: FallbackDecider, part: list[tuple[int, bool]]) -> list[list[Change]]:
        return [decider.check({layer: {"t": BAD if bad else GOOD}}) for layer, bad in part]

    whole, first, second = (FallbackDecider(POLICY) for _ in range(3))
    expected = apply(whole, checks)
    before = apply(first, checks[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + apply(second, checks[cut:]) == expected
    assert second.state_dict() == whole.state_dict()


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ValueError, match="not the state"):
        FallbackDecider(POLICY).load_state_dict({"fallen_back": [], "counted_layers": [1], "counts": []})


def test_degenerate_sums() -> None:
    assert TensorHealth.from_sums([0, 0, 0, 0, 0, 0]) == TensorHealth(0.0, 0.0, 0.0)
    assert TensorHealth.from_sums([8, 0, 0, 0, 0, 0]).sqnr_db == math.inf
    assert math.isnan(TensorHealth.from_sums([8, 8, 0, 0, math.nan, math.nan]).error)
    assert math.isnan(TensorHealth.from_sums([8, 8, 0, 0, math.inf, math.inf]).error)
    assert TensorHealth.from_sums([8, 4, 2, 1, 1.0, 100.0]) == TensorHealth(0.25, 0.25, 0.1)
    assert TensorHealth(0, 0, 0.1).sqnr_db == pytest.approx(20)
