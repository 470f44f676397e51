"""When delayed scales are computed, and from what: sequences of amaxes through one linear layer."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.small_run import small_config

FP32_MAX = torch.finfo(torch.float32).max


def build_linear(group=None, **precision):
    """A manager, reducing amaxes over `group`, and a linear layer in its charge."""
    import transformer_engine.pytorch as te

    from megatron_fp8.precision.manager import PrecisionManager
    from megatron_fp8.precision.policy import build_policy

    config = small_config(precision={"mode": "fp8", **precision}).precision
    manager = PrecisionManager(build_policy(config, num_layers=4), group, torch.device("cuda"))
    torch.manual_seed(0)
    linear = te.Linear(16, 16, params_dtype=torch.bfloat16, device="cuda")
    manager.attach({0: linear})
    return manager, linear


def scales_after(amaxes: list[float], start: float, skipped: tuple[int, ...], precision: dict) -> list[float]:
    """The input's scale after each step of a layer whose input had these amaxes."""
    manager, linear = build_linear(**precision)
    state = next(iter(manager.scaling_states()))
    state.scale.fill_(start)
    scales = []
    for step, amax in enumerate(amaxes):
        with manager.training_step(), manager.region(0):
            linear(torch.zeros(16, 16, dtype=torch.bfloat16, requires_grad=True, device="cuda"))
        # The kernel collects the running amax here; written directly, it need not be a BF16 number.
        state.amax_history[0][0] = amax
        manager.finish_step(skipped=step in skipped)
        scales.append(float(state.scale[0]))
    return scales


def expect(amaxes, scales, start=1.0, skipped=(), **precision) -> None:
    (seen,) = run_on_ranks(1, scales_after, amaxes, start, skipped, precision)
    assert seen == pytest.approx(scales, rel=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "scales"),
    [("max", [448, 56, 56, 56, 56, 224, 224]), ("most_recent", [448, 56, 224, 224, 224, 224, 224])],
)
def test_history_of_four(algorithm: str, scales: list[float]) -> None:
    expect([1, 8, 2, 2, 2, 2, 2], scales, fp8_amax_history_len=4, fp8_amax_compute_algo=algorithm)


def test_degenerate_amaxes() -> None:
    expect(
        [0.0, 1e-40, 3.5, math.inf, math.nan],
        [7.0, FP32_MAX, 128.0, 128.0, 128.0],
        start=7.0,
        fp8_amax_history_len=1,
        fp8_amax_compute_algo="most_recent",
    )


def test_an_infinite_amax_does_not_hold_the_scale_for_a_whole_history() -> None:
    expect([4.0, math.inf, 2.0, 2.0], [112, 112, 112, 112], fp8_amax_history_len=8)
    expect([4.0, math.inf, 8.0, 2.0], [112, 112, 56, 56], fp8_amax_history_len=8)


def test_margin_halves_the_scale() -> None:
    expect([1.0, 2.0], [112, 56], fp8_margin=2)


def test_interval_computes_scales_on_every_third_step_and_keeps_what_it_saw() -> None:
    amaxes = [8.0, 1.0, 2.0, 1.0, 1.0, 1.0]
    # Steps 3 and 6 compute; a history of four has lost step 1's amax (the newest three count) by step 6 only.
    expect(amaxes, [1, 1, 56, 56, 56, 224], fp8_interval=3, fp8_amax_history_len=5)


def test_a_skipped_step_leaves_no_trace() -> None:
    expect([4.0, 64.0, 2.0], [112, 112, 112], skipped=(1,), fp8_amax_history_len=8)
    # Nor does it count for the interval.
    expect([4.0, 64.0, 4.0], [1, 1, 112], skipped=(1,), fp8_interval=2, fp8_amax_history_len=8)


def nan_on_one_rank() -> tuple[list[float], list[list[float]]]:
    """Rank 1's input is NaN in the second of three steps; rank 0's is fine."""
    from megatron.core import parallel_state

    from megatron_fp8.parallel.groups import amax_group, build_groups

    config = small_config(precision={"mode": "fp8", "fp8_amax_history_len": 4})
    groups = build_groups(config.parallel)
    manager, linear = build_linear(amax_group("auto", groups), fp8_amax_history_len=4)
    bad = (math.nan, math.inf)[groups.rank % 2]
    states = list(manager.scaling_states())
    for step in range(3):
        value = bad if step == 1 and groups.rank > 0 else float(step + 1)
        with manager.training_step():
            with manager.region(0):
                output = linear(torch.full((16, 16), value, dtype=torch.bfloat16, requires_grad=True, device="cuda"))
            output.sum().backward()
        manager.finish_step(skipped=False)
    parallel_state.destroy_model_parallel()
    assert states[0].amax_history[2][0] == 2.0
    return states[0].scale.tolist(), [row for state in states for row in state.amax_history.tolist()]


def test_nan_on_one_rank_never_enters_a_history() -> None:
    results = run_on_ranks(3, nan_on_one_rank)
    for _, histories in results:
        assert all(math.isfinite(amax) for row in histories for amax in row)
    # A gradient behind a NaN output is finite here: what was finite has been seen by all.
    assert results[0] == results[1] == results[2]
    assert results[0][0][0] == pytest.approx(448 / 3)
