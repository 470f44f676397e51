"""Activations of the stand-in against float64 autograd, with and without quantizers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

te = pytest.importorskip("transformer_engine.pytorch")
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch.constants import DType  # noqa: E402
from transformer_engine.pytorch.tensor.float8_tensor import (  # noqa: E402
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)

from megatron_fp8.cpu.kernels import activations  # noqa: E402

Function = Callable[..., torch.Tensor]
SITU = (4.0, 25.0)
CLAMPED = (1.5, 1.702, 1.0)


def _gated(gate: Function) -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return gate(a) * b

    return function


def _situglu(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return SITU[0] * torch.tanh(a / SITU[0]) * torch.sigmoid(a) * SITU[1] * torch.tanh(b / SITU[1])


def _clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    limit, alpha, offset = CLAMPED
    a, b = x.chunk(2, dim=-1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit) + offset
    return a * torch.sigmoid(alpha * a) * b


gelu = functools.partial(F.gelu, approximate="tanh")
UNARY: dict[str, Function] = {
    "gelu": gelu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
GATED: dict[str, tuple[str, Function, tuple[float, ...]]] = {
    "geglu": ("dgeglu", _gated(gelu), ()),
    "glu": ("dglu", _gated(torch.sigmoid), ()),
    "qgeglu": ("dqgeglu", _gated(UNARY["qgelu"]), ()),
    "reglu": ("dreglu", _gated(F.relu), ()),
    "sreglu": ("dsreglu", _gated(UNARY["srelu"]), ()),
    "swiglu": ("dswiglu", _gated(F.silu), ()),
    "situglu": ("dsituglu", _situglu, SITU),
    "clamped_swiglu": ("clamped_dswiglu", _clamped_swiglu, CLAMPED),
}
ALL = {**{name: (f"d{name}", function, ()) for name, function in UNARY.items()}, **GATED}


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """One rounding to dtype of what FP32 arithmetic makes: relative to each value, and to the terms of small ones."""
    assert got.dtype == dtype
    largest = wanted.abs().max().item() if wanted.numel() else 0.0
    tolerance = 0.5 * torch.finfo(dtype).eps + 3e-6
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=3e-6 + 1e-6 * largest)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(ALL)),
    rows=st.integers(0, 30),
    width=st.sampled_from([1, 3, 16, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spread=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_forward_and_backward(name: str, rows: int, width: int, dtype: torch.dtype, spread: float) -> None:
    backward, function, parameters = ALL[name]
    generator = torch.Generator("cuda").manual_seed(rows * 100 + width)
    x = (torch.randn(rows, 1, width * (2 if name in GATED else 1), generator=generator) * spread).to(dtype)
    dy = torch.randn(rows, 1, width, generator=generator).to(dtype)
    leaf = x.double().requires_grad_()
    wanted = function(leaf)
    wanted.backward(dy.double())
    assert leaf.grad is not None
    close(getattr(tex, name)(x, None, *parameters), wanted.detach(), dtype)
    close(getattr(tex, backward)(dy, x, None, *parameters), leaf.grad, dtype)


@pytest.mark.parametrize("name", ALL)
def test_rows_are_the_same_in_every_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backward, _, parameters = ALL[name]
    x = torch.randn(50, 24)
    dy = torch.randn(50, 12 if name in GATED else 24)
    whole = getattr(tex, name)(x, None, *parameters), getattr(tex, backward)(dy, x, None, *parameters)
    monkeypatch.setattr(activations, "_BLOCK_ELEMENTS", 24 * 7)
    pieces = getattr(tex, name)(x, None, *parameters), getattr(tex, backward)(dy, x, None, *parameters)
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_gradient_is_the_sum_before_rounding(name: str, dtype: torch.dtype) -> None:
    x, dy = torch.randn(40, 2, 16).to(dtype), torch.randn(40, 2, 16).to(dtype)
    leaf = x.double().requires_grad_()
    UNARY[name](leaf).backward(dy.double())
    assert leaf.grad is not None
    bias_gradient, dx = getattr(tex, f"dbias_d{name}")(dy, x, None)
    close(dx, leaf.grad, dtype)
    assert bias_gradient.dtype == dtype
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(bias_gradient.double(), leaf.grad.sum((0, 1)), rtol=tolerance, atol=1e-5)


def quantizer() -> Float8Quantizer:
    return Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1), DType.kFloat8E4M3)


def check_delayed(out: Any, used: Float8Quantizer, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    assert used.amax.item() == exact.abs().max().item()
    wanted = (exact * 8).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(out._data.view(torch.float8_e4m3fn).float(), wanted.float())


@pytest.mark.parametrize("name", ALL)
def test_delayed_scaling_quantizes_the_fp32_result(name: str) -> None:
    backward, _, parameters = ALL[name]
    x = torch.randn(32, 32).bfloat16()
    dy = torch.randn(32, 16 if name in GATED else 32).bfloat16()
    forward, gradient = getattr(tex, name), getattr(tex, backward)
    used = quantizer()
    check_delayed(forward(x, used, *parameters), used, forward(x.float(), None, *parameters), x.dtype)
    used = quantizer()
    exact = gradient(dy.float(), x.float(), None, *parameters)
    check_delayed(gradient(dy, x, used, *parameters), used, exact, x.dtype)
    if name in UNARY:
        used = quantizer()
        check_delayed(getattr(tex, f"dbias_d{name}")(dy, x, used)[1], used, exact, x.dtype)


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_current_scaling_quantizes_the_rounded_result(name: str) -> None:
    x = torch.randn(32, 32).bfloat16()
    current = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device=torch.device("cuda"))
    out = getattr(tex, name)(x, current)
    assert torch.equal(out._data, current(getattr(tex, name)(x, None))._data)


def test_wrong_parameters_are_refused() -> None:
    for values, keywords in (((4.0, 25.0, 1.0), {}), ((4.0,), {"beta1": 4.0}), ((), {"limit": 7.0})):
        with pytest.raises(TypeError, match="beta1"):
            tex.situglu(torch.ones(2, 4), None, *values, **keywords)
    with pytest.raises(TypeError, match="quantizer"):
        tex.gelu(torch.ones(2, 4))


def test_parameters_have_the_defaults_of_the_bindings() -> None:
    y = tex.clamped_swiglu(torch.ones(1, 32), None)
    assert y.tolist() == [[pytest.approx(2 / (1 + math.exp(-1.702)), rel=1e-6)] * 16]
    x, dy = torch.randn(3, 8), torch.randn(3, 4)
    explicit = tex.dsituglu(dy, x, None, 4.0, 25.0)
    assert torch.equal(tex.dsituglu(grad=dy, fwd_input=x, quantizer=None), explicit)


def test_not_finite_values_stay_visible() -> None:
    x = torch.tensor([[float("nan"), 1.0, 2.0, 3.0]])
    for name, (_, _, parameters) in ALL.items():
        assert getattr(tex, name)(x, None, *parameters).isnan().any(), name
