"""Delayed scaling's update against TE's own Python functions, bit for bit; the scale of one tensor."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.cpu import install

install()

import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.common.recipe import DelayedScaling, Format  # noqa: E402
from transformer_engine.pytorch import quantization  # noqa: E402

from megatron_fp8.cpu.kernels.casts import scale_from_amax  # noqa: E402

FP32_MAX = torch.finfo(torch.float32).max
E4M3 = tex.DType.kFloat8E4M3
# With NaN, infinities, zero, subnormals and amaxes so small that 448 / amax overflows.
amaxes = st.floats(0, width=32, allow_infinity=True) | st.sampled_from([0.0, 1e-40, math.inf, math.nan])
scales = st.floats(2.0**-126, FP32_MAX, width=32)


def update_here(
    reduced: torch.Tensor, histories: list[torch.Tensor], scale: list[torch.Tensor], **recipe: object
) -> None:
    tex.fused_amax_and_scale_update_after_reduction(
        reduced, histories, scale, recipe["amax_compute_algo"], recipe.get("dtype", E4M3), recipe.get("margin", 0)
    )


@st.composite
def modules(draw: st.DrawFn) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Several modules' amax histories `[length, operands]`, scales `[operands]` and reduced amaxes `[operands]`."""
    result = []
    for _ in range(draw(st.integers(1, 3))):
        length, operands = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        numbers = st.lists(amaxes, min_size=length * operands, max_size=length * operands)
        history = torch.tensor(draw(numbers)).reshape(length, operands)
        scale = torch.tensor(draw(st.lists(scales, min_size=operands, max_size=operands)))
        reduced = torch.tensor(draw(st.lists(amaxes, min_size=operands, max_size=operands)))
        result.append((history, scale, reduced))
    return result


@settings(max_examples=150, deadline=None)
@given(modules=modules(), algorithm=st.sampled_from(["max", "most_recent"]), margin=st.integers(-2, 3))
@pytest.mark.parametrize(("fp8_format", "limit"), [(Format.E4M3, 448.0), (Format.E5M2, 57344.0)], ids=["e4m3", "e5m2"])
def test_update_equals_transformer_engines_python(modules, algorithm, margin, fp8_format, limit) -> None:  # type: ignore[no-untyped-def]
    recipe = DelayedScaling(margin=margin, amax_compute_algo=algorithm, fp8_format=Format.HYBRID)
    expected = [(history.clone(), scale.clone()) for history, scale, _ in modules]
    for (history, scale), (_, _, reduced) in zip(expected, modules, strict=True):
        history[0].copy_(reduced)
        quantization._amax_and_scale_update(history, scale, limit, recipe)
    histories, scale, reduced = map(list, zip(*modules, strict=True))
    dtype = E4M3 if fp8_format is Format.E4M3 else tex.DType.kFloat8E5M2
    update_here(torch.cat(reduced), histories, scale, amax_compute_algo=algorithm, margin=margin, dtype=dtype)
    for history, scale_here, (expected_history, expected_scale) in zip(histories, scale, expected, strict=True):
        assert torch.equal(history.view(torch.int32), expected_history.view(torch.int32))
        assert torch.equal(scale_here.view(torch.int32), expected_scale.view(torch.int32))


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("max", [448, 56, 56, 56, 56, 224, 224]), ("most_recent", [448, 56, 224, 224, 224, 224, 224])],
)
def test_an_outlier_leaves_after_the_history_length(algorithm: str, expected: list[float]) -> None:
    history, scale, seen = torch.zeros(4, 1), torch.ones(1), []
    for amax in [1.0, 8.0, 2.0, 2.0, 2.0, 2.0, 2.0]:
        update_here(torch.tensor([amax]), [history], [scale], amax_compute_algo=algorithm)
        seen.append(scale.item())
    assert seen == expected


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_degenerate_amaxes(algorithm: str) -> None:
    history, scale = torch.zeros(1, 5), torch.full((5,), 7.0)
    reduced = torch.tensor([0.0, 1e-40, 3.5, math.inf, math.nan])
    update_here(reduced, [history], [scale], amax_compute_algo=algorithm)
    assert scale.tolist() == [7.0, FP32_MAX, 128.0, 7.0, 7.0]
    assert history.tolist() == [[0.0] * 5]


def test_modules_with_different_history_lengths_all_update() -> None:
    histories, scale = [torch.zeros(1, 2), torch.zeros(16, 1), torch.zeros(3, 3)], [torch.ones(n) for n in (2, 1, 3)]
    update_here(torch.tensor([1.0, 2.0, 4.0, 7.0, 8.0, 16.0]), histories, scale, amax_compute_algo="max")
    assert torch.cat(scale).tolist() == [448.0, 224.0, 112.0, 64.0, 56.0, 28.0]
    assert [history[-1].tolist() for history in histories] == [[0.0, 0.0], [4.0], [7.0, 8.0, 16.0]]


def test_scales_are_updated_in_place() -> None:
    scale = torch.ones(2)
    first, second = scale[:1], scale[1:]
    histories = [torch.zeros(2, 1), torch.zeros(2, 1)]
    update_here(torch.tensor([1.0, 2.0]), histories, [first, second], amax_compute_algo="max")
    assert scale.tolist() == [448.0, 224.0]


def test_another_algorithm_is_named() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*'max' or 'most_recent'"):
        update_here(torch.ones(1), [torch.zeros(2, 1)], [torch.ones(1)], amax_compute_algo="mean")


def test_scale_of_one_tensor() -> None:
    amax = torch.tensor([448.0, 1.0, 3.0, 0.0, 1e-40, math.inf, math.nan])
    assert scale_from_amax(amax, 448.0, False, 0.0).tolist() == [
        1.0,
        448.0,
        (torch.tensor(448.0) / 3).item(),
        1.0,
        FP32_MAX,
        1.0,
        1.0,
    ]
    assert scale_from_amax(amax, 448.0, True, 0.0).tolist() == [1.0, 256.0, 128.0, 1.0, 2.0**127, 1.0, 1.0]
    assert scale_from_amax(torch.tensor([0.0, 0.5, 3.5]), 448.0, False, 1.0).tolist() == [448.0, 448.0, 128.0]


def test_compute_amax() -> None:
    amax = torch.tensor([9.0])
    tex.compute_amax(torch.tensor([[1.0, -3.0]], dtype=torch.bfloat16), amax)
    assert amax.tolist() == [3.0]
