"""Scale updates against Transformer Engine's own Python, bit for bit, and the numbers that users were bitten by."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformer_engine_torch as tex
from hypothesis import given, settings
from hypothesis import strategies as st
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import _amax_and_scale_update

from megatron_fp8.cpu.kernels.scaling import scale_from_amax

FP32_MAX = torch.finfo(torch.float32).max
DEGENERATE = [0.0, 1e-40, 1e-45, torch.inf, torch.nan, FP32_MAX, 448.0]
numbers = st.one_of(
    st.sampled_from(DEGENERATE), st.floats(min_value=0, width=32, allow_nan=False, allow_infinity=False)
)
scale_numbers = st.one_of(st.sampled_from([1.0, FP32_MAX, torch.inf]), st.floats(2.0**-60, 2.0**60, width=32))


def update(amaxes: list, histories: list, scales: list, algorithm: str = "max", dtype=None, margin: int = 0) -> None:
    tex.fused_amax_and_scale_update_after_reduction(
        torch.tensor(amaxes), histories, scales, algorithm, dtype or tex.DType.kFloat8E4M3, margin
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (torch.isnan(a) & torch.isnan(b))).all())


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    algorithm=st.sampled_from(["max", "most_recent"]),
    margin=st.integers(-2, 3),
    fp8=st.sampled_from([(tex.DType.kFloat8E4M3, 448.0), (tex.DType.kFloat8E5M2, 57344.0)]),
)
def test_update_equals_transformer_engines_python(data, lengths, algorithm, margin, fp8) -> None:
    def draw(strategy: st.SearchStrategy, *shape: int) -> torch.Tensor:
        count = int(np.prod(shape))
        return torch.tensor(data.draw(st.lists(strategy, min_size=count, max_size=count))).view(*shape)

    # Modules of 3, 2 and 3 FP8 tensors, each with a history of its own length.
    sizes = [3, 2, 3][: len(lengths)]
    histories = [draw(numbers, length, size) for length, size in zip(lengths, sizes, strict=True)]
    scales = [draw(scale_numbers, size) for size in sizes]
    amaxes = draw(numbers, sum(sizes))
    expected_histories = [history.clone() for history in histories]
    expected_scales = [scale.clone() for scale in scales]
    recipe = DelayedScaling(margin=margin, amax_compute_algo=algorithm)
    for part, history, scale in zip(amaxes.split(sizes), expected_histories, expected_scales, strict=True):
        history[0].copy_(part)
        _amax_and_scale_update(history, scale, fp8[1], recipe)

    tex.fused_amax_and_scale_update_after_reduction(amaxes, histories, scales, algorithm, fp8[0], margin)
    for actual, expected in zip(histories + scales, expected_histories + expected_scales, strict=True):
        assert same_bits(actual, expected), (actual, expected)


def test_degenerate_amaxes() -> None:
    history, scale = torch.zeros(4, 5), torch.full((5,), 7.0)
    update([0.0, 1e-40, 3.5, torch.inf, torch.nan], [history], [scale])
    assert scale.tolist() == [7, FP32_MAX, 128, 7, 7]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("max", [448, 56, 56, 56, 56, 224, 224]), ("most_recent", [448, 56, 224, 224, 224, 224, 224])],
)
def test_history_of_four(algorithm: str, expected: list[float]) -> None:
    history, scale = torch.zeros(4, 1), torch.ones(1)
    # A module with another history length in the same update must not disturb it.
    other_history, other_scale = torch.zeros(16, 2), torch.ones(2)
    reached = []
    for amax in [1.0, 8.0, 2.0, 2.0, 2.0, 2.0, 2.0]:
        update([amax, 1.0, amax], [history, other_history], [scale, other_scale], algorithm)
        reached.append(scale.item())
    assert reached == expected
    assert other_scale.tolist() == [448, 56 if algorithm == "max" else 224]


def test_zero_amaxes_do_not_erase_a_scale() -> None:
    history, scale = torch.zeros(2, 1), torch.ones(1)
    for amax in [4.0, 0.0, 0.0, 0.0]:
        update([amax], [history], [scale])
    assert scale.item() == 112


def test_unknown_algorithm_is_an_error() -> None:
    with pytest.raises(ValueError, match="mean"):
        update([1.0], [torch.zeros(1, 1)], [torch.ones(1)], "mean")


@pytest.mark.parametrize(
    ("amax", "options", "expected"),
    [
        (3.5, {}, 128.0),
        (3.0, {}, float(np.float32(448) / np.float32(3))),
        (0.0, {}, 1.0),
        (torch.inf, {}, 1.0),
        (torch.nan, {}, 1.0),
        (1e-40, {}, FP32_MAX),
        (1e-40, {"force_pow_2_scales": True}, 2.0**127),
        (3.0, {"force_pow_2_scales": True}, 128.0),
        (3.5, {"force_pow_2_scales": True}, 128.0),
        (0.0, {"force_pow_2_scales": True}, 1.0),
        (1e-6, {"epsilon": 1.0}, 448.0),
        (0.0, {"epsilon": 1.0}, 448.0),
        (2.0, {"epsilon": 1.0}, 224.0),
        (torch.nan, {"epsilon": 1.0}, 1.0),
    ],
)
def test_scale_of_current_scaling(amax: float, options: dict, expected: float) -> None:
    arguments = {"force_pow_2_scales": False, "epsilon": 0.0} | options
    assert scale_from_amax(torch.tensor([amax]), 448.0, **arguments).item() == expected


def test_compute_amax_writes_in_place() -> None:
    amax = torch.zeros(1)
    tex.compute_amax(torch.tensor([[1.0, -5.0]]).bfloat16(), amax)
    assert amax.item() == 5
