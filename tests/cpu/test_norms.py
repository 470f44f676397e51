"""LayerNorm and RMSNorm of the stand-in against float64 autograd, alone and in TE's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

te = pytest.importorskip("transformer_engine.pytorch")
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch.constants import DType, TE_DType  # noqa: E402
from transformer_engine.pytorch.tensor.float8_tensor import (  # noqa: E402
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)

EPSILON = 1e-5


def exact_layernorm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, gamma.shape, gamma, beta, EPSILON)


def exact_rmsnorm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * gamma


def close(got: torch.Tensor, wanted: torch.Tensor | None, dtype: torch.dtype, terms: float) -> None:
    """Within one rounding to dtype, and FP32 rounding of what is added up, of which the largest sum is `terms`."""
    assert wanted is not None
    assert got.dtype == dtype
    error = (got.double() - wanted).abs()
    assert (error <= 0.6 * torch.finfo(dtype).eps * wanted.abs() + 2e-6 * terms + 1e-7).all()


shapes = given(
    rows=st.integers(1, 40),
    hidden=st.sampled_from([1, 2, 7, 16, 96, 257]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    zero_centered=st.booleans(),
    mean=st.sampled_from([0.0, 3.0, -50.0]),
)


def draw(rows: int, hidden: int, dtype: torch.dtype, mean: float) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows * 1000 + hidden)
    x = (torch.randn(rows, hidden, generator=generator) + mean).to(dtype)
    gamma, beta = (torch.randn(hidden, generator=generator).to(dtype) for _ in range(2))
    return [x, gamma, beta, torch.randn(rows, hidden, generator=generator).to(dtype)]


@settings(max_examples=60, deadline=None)
@shapes
def test_layernorm(rows: int, hidden: int, dtype: torch.dtype, zero_centered: bool, mean: float) -> None:
    x, gamma, beta, dy = draw(rows, hidden, dtype, mean)
    y, mu, rsigma = tex.layernorm_fwd(x, gamma, beta, EPSILON, None, None, TE_DType[dtype], 0, zero_centered)
    assert mu.dtype == rsigma.dtype == torch.float32
    assert mu.shape == rsigma.shape == (rows,)
    dx, dgamma, dbeta = tex.layernorm_bwd(dy, x, mu, rsigma, gamma, 0, zero_centered)
    leaves = [t.double().requires_grad_() for t in (x, gamma, beta)]
    wanted = exact_layernorm(leaves[0], leaves[1] + zero_centered, leaves[2])
    wanted.backward(dy.double())
    torch.testing.assert_close(mu.double(), leaves[0].mean(-1), rtol=1e-5, atol=1e-5)
    # x and its mean, in units of the result, are subtracted in FP32.
    normalized = ((leaves[0].detach().abs() + abs(mean)) * rsigma.unsqueeze(1)).max().item()
    scale = (leaves[1].detach() + zero_centered).abs().max().item()
    grad = dy.double().abs()
    close(y, wanted, dtype, normalized * scale)
    close(dx, leaves[0].grad, dtype, normalized**2 * scale * grad.max().item() * rsigma.max().item())
    close(dgamma, leaves[1].grad, gamma.dtype, grad.sum(0).max().item() * normalized)
    close(dbeta, leaves[2].grad, beta.dtype, grad.sum(0).max().item())


@settings(max_examples=60, deadline=None)
@shapes
def test_rmsnorm(rows: int, hidden: int, dtype: torch.dtype, zero_centered: bool, mean: float) -> None:
    x, gamma, _, dy = draw(rows, hidden, dtype, mean)
    y, absent, rsigma = tex.rmsnorm_fwd(x, gamma, EPSILON, None, None, TE_DType[dtype], 0, zero_centered)
    assert absent is None
    assert rsigma.dtype == torch.float32
    assert rsigma.shape == (rows,)
    dx, dgamma = tex.rmsnorm_bwd(dy, x, rsigma, gamma, 0, zero_centered)
    leaves = [t.double().requires_grad_() for t in (x, gamma)]
    wanted = exact_rmsnorm(leaves[0], leaves[1] + zero_centered)
    wanted.backward(dy.double())
    normalized = (leaves[0].detach().abs() * rsigma.unsqueeze(1)).max().item()
    scale = (leaves[1].detach() + zero_centered).abs().max().item()
    grad = dy.double().abs()
    terms = normalized**2 * scale * grad.max().item() * rsigma.max().item()
    close(y, wanted, dtype, normalized * scale)
    close(dx, leaves[0].grad, dtype, terms)
    close(dgamma, leaves[1].grad, gamma.dtype, grad.sum(0).max().item() * normalized)
    residual = torch.randn(rows, hidden).to(dtype)
    added, dgamma_again = tex.rmsnorm_bwd_add(dy, x, residual, rsigma, gamma, 0, zero_centered)
    assert torch.equal(dgamma, dgamma_again)
    assert leaves[0].grad is not None
    close(added, leaves[0].grad + residual.double(), dtype, terms + residual.abs().max().item())


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_output_dtype_and_given_output(kind: str) -> None:
    x, gamma, beta, _ = draw(5, 16, torch.float32, 1.0)
    weights = (gamma, beta) if kind == "layernorm" else (gamma,)
    function = getattr(tex, f"{kind}_fwd")
    exact = function(x, *weights, EPSILON, None, None, DType.kFloat32, 0, False)[0]
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(function(x, *weights, EPSILON, None, None, TE_DType[dtype], 0, False)[0], exact.to(dtype))
        out = torch.empty(5, 16, dtype=dtype)
        assert function(x, *weights, EPSILON, out, None, TE_DType[dtype], 0, False)[0] is out
        assert torch.equal(out, exact.to(dtype))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delayed_scaling_quantizes_the_fp32_result(kind: str, dtype: torch.dtype) -> None:
    x, gamma, beta, _ = draw(32, 48, dtype, 1.0)
    weights = (gamma, beta) if kind == "layernorm" else (gamma,)
    wide = [t.float() for t in weights]
    function = getattr(tex, f"{kind}_fwd")
    exact = function(x.float(), *wide, EPSILON, None, None, DType.kFloat32, 0, False)[0]
    quantizer = Float8Quantizer(torch.full((1,), 16.0), torch.zeros(1), DType.kFloat8E4M3)
    out = function(x, *weights, EPSILON, None, quantizer, TE_DType[dtype], 0, False)[0]
    assert out.dtype == dtype, "the nominal dtype is the module's"
    assert quantizer.amax.item() == exact.abs().max().item()
    wanted = (exact * 16).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(out._data.view(torch.float8_e4m3fn).float(), wanted.float())


def test_current_scaling_quantizes_the_rounded_result() -> None:
    x, gamma, _, _ = draw(32, 48, torch.bfloat16, 1.0)
    rounded = tex.rmsnorm_fwd(x, gamma, EPSILON, None, None, DType.kBFloat16, 0, False)[0]
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device=torch.device("cuda"))
    out = tex.rmsnorm_fwd(x, gamma, EPSILON, None, quantizer, DType.kBFloat16, 0, False)[0]
    assert torch.equal(out._data, quantizer(rounded)._data)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_te_modules_equal_the_written_out_layer(normalization: str, zero_centered: bool) -> None:
    options = {"params_dtype": torch.float32, "normalization": normalization}
    joined = te.LayerNormLinear(24, 16, zero_centered_gamma=zero_centered, **options)
    torch.nn.init.normal_(joined.layer_norm_weight)
    x = torch.randn(6, 2, 24, requires_grad=True)
    dy = torch.randn(6, 2, 16)
    y = joined(x)
    y.backward(dy)
    leaves = {name: p.detach().double().requires_grad_() for name, p in joined.named_parameters()}
    leaf = x.detach().double().requires_grad_()
    gamma = leaves["layer_norm_weight"] + zero_centered
    if normalization == "LayerNorm":
        normalized = exact_layernorm(leaf, gamma, leaves["layer_norm_bias"])
    else:
        normalized = exact_rmsnorm(leaf, gamma)
    wanted = normalized @ leaves["weight"].T + leaves["bias"]
    wanted.backward(dy.double())
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), leaf.grad, rtol=1e-5, atol=1e-5)
    for name, parameter in joined.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), leaves[name].grad, rtol=1e-5, atol=1e-5)


BF16, FP32 = torch.bfloat16, torch.float32


def weight(shape: int = 16, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def rows(dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.ones(4, 16, dtype=dtype)


def layernorm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> Any:
    return tex.layernorm_fwd(x, gamma, beta, EPSILON, None, None, TE_DType[x.dtype], 0, False)


def rmsnorm(x: torch.Tensor, gamma: torch.Tensor, out: torch.dtype = FP32, epsilon: float = EPSILON) -> Any:
    return tex.rmsnorm_fwd(x, gamma, epsilon, None, None, TE_DType[out], 0, False)


# By name: the call, and words of TE's error.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "gamma of another size": (lambda: rmsnorm(rows(), weight(15)), "same hidden size"),
    "LayerNorm's too": (lambda: layernorm(rows(), weight(15), weight(15)), "same hidden size"),
    "beta of another size": (
        lambda: layernorm(rows(), weight(), weight(15)),
        "Gamma and Beta must have the same shape",
    ),
    "beta of another dtype": (lambda: layernorm(rows(), weight(), weight(16, BF16)), "Gamma and Beta .* same dtype"),
    "FP32 weight of BF16 input": (lambda: rmsnorm(rows(BF16), weight(), BF16), "Unavailable kernel"),
    "BF16 input to FP32": (lambda: rmsnorm(rows(BF16), weight(16, BF16), FP32), "Unavailable kernel"),
    "FP64": (lambda: rmsnorm(rows(torch.float64), weight(16, torch.float64), FP32), "Unavailable kernel"),
    "negative epsilon": (lambda: rmsnorm(rows(), weight(), epsilon=-1.0), "Epsilon must be non-negative"),
    "input out of order": (lambda: rmsnorm(rows().t(), torch.ones(4)), "x is not contiguous"),
    "E5M2": (
        lambda: tex.rmsnorm_fwd(
            *(rows(), weight(), EPSILON, None),
            *(Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E5M2), DType.kFloat32, 0, False),
        ),
        "Unavailable kernel",
    ),
    "gradient of another dtype": (
        lambda: tex.rmsnorm_bwd(rows(BF16), rows(), torch.ones(4), weight(), 0, False),
        "dz .* same dtype",
    ),
    "gradient of another shape": (
        lambda: tex.layernorm_bwd(rows()[:2], rows(), torch.ones(4), torch.ones(4), weight(), 0, False),
        "dz has shape",
    ),
    "residual of another dtype": (
        lambda: tex.rmsnorm_bwd_add(rows(), rows(), rows(BF16), torch.ones(4), weight(), 0, False),
        "add .* same dtype",
    ),
    "rsigma in BF16": (
        lambda: tex.rmsnorm_bwd(rows(), rows(), torch.ones(4, dtype=BF16), weight(), 0, False),
        "rsigma must be a float32",
    ),
    "rsigma of other rows": (
        lambda: tex.rmsnorm_bwd(rows(), rows(), torch.ones(5), weight(), 0, False),
        "rsigma must be 1D",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_te_refuses_is_refused(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(RuntimeError, match=words):
        call()


def test_backward_takes_what_is_not_contiguous() -> None:
    """TE copies it first."""
    dz = torch.randn(16, 4).t()
    x, statistics = torch.randn(4, 16), torch.ones(4)
    ours = tex.rmsnorm_bwd(dz, x.t().contiguous().t(), statistics, weight(), 0, False)
    for a, b in zip(ours, tex.rmsnorm_bwd(dz.contiguous(), x, statistics, weight(), 0, False), strict=True):
        torch.testing.assert_close(a, b)
