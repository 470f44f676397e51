"""TE's own Linear and LayerNormLinear in FP8, forward and backward, against float64 on the operands FP8 gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from tests.cpu.fp8_reference import rounded

ROWS, IN, OUT = 32, 48, 16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Order of a Linear's FP8 tensors.
INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 0


@pytest.fixture(autouse=True)
def _fresh_fp8_state() -> Iterator[None]:
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def module(kind: str, dtype: torch.dtype, **options: Any) -> Any:
    made = getattr(te, kind)(IN, OUT, params_dtype=dtype, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(made.parameters()):
            parameter.add_(0.1 * numbers(*parameter.shape, seed=seed).to(dtype))
    return made


def step(made: Any, x: torch.Tensor, grad: torch.Tensor, recipe: Any, **options: Any) -> Any:
    """Output of one forward and backward; gradients are in `x` and the parameters."""
    x.grad = None
    for parameter in made.parameters():
        parameter.grad = None
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        out = made(x, **options)
    first = out[0] if isinstance(out, tuple) else out
    first.backward(grad)
    return out


def scales(made: Any, key: str) -> list[float]:
    return made.fp8_meta[key].scale.tolist()


def current_scale(x: torch.Tensor, limit: float) -> float:
    return float(torch.tensor(limit) / x.detach().abs().max().float())


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for FP32 sums and one rounding to the dtype of `actual`."""
    per_element = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}[actual.dtype]
    limit = per_element * expected.abs() + 1e-6 * expected.abs().max()
    assert ((actual.double() - expected).abs() <= limit).all(), (actual.double() - expected).abs().max()


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=4), Float8CurrentScaling()], ids=["delayed", "now"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(dtype: torch.dtype, bias: bool, recipe: Any) -> None:
    made = module("Linear", dtype, bias=bias)
    x, grad = numbers(ROWS, IN, seed=11, dtype=dtype).requires_grad_(), 0.01 * numbers(ROWS, OUT, seed=12, dtype=dtype)
    # With delayed scaling the scales come from the first step.
    step(made, x, grad, recipe)
    step(made, x, grad, recipe)
    if recipe.delayed():
        forward, backward = scales(made, "scaling_fwd"), scales(made, "scaling_bwd")
        scale_x, scale_w, scale_g = forward[INPUT], forward[WEIGHT], backward[GRAD_OUTPUT]
        assert scale_x == pytest.approx(current_scale(x, 448), rel=1e-6)
        assert scale_g == pytest.approx(current_scale(grad, 57344), rel=1e-6)
    else:
        scale_x, scale_w = current_scale(x, 448), current_scale(made.weight, 448)
        scale_g = current_scale(grad, 57344)
    out = step(made, x, grad, recipe)

    x8, w8 = rounded(x.detach(), scale_x, E4M3), rounded(made.weight.detach(), scale_w, E4M3)
    g8 = rounded(grad, scale_g, E5M2)
    # TE gives FP32 modules a BF16 bias in FP8 GEMMs, as cuBLAS has no other.
    added = made.bias.detach().bfloat16().double() if bias else 0
    assert out.dtype == dtype
    assert_close(out.detach(), x8 @ w8.t() + added)
    assert_close(x.grad, g8 @ w8)
    assert_close(made.weight.grad, g8.t() @ x8)
    if bias:
        assert_close(made.bias.grad, grad.double().sum(dim=0))


def test_layernorm_linear() -> None:
    made = module("LayerNormLinear", torch.float32, return_layernorm_output=True)
    recipe = DelayedScaling(amax_history_len=4)
    x, grad = numbers(ROWS, IN, seed=11).requires_grad_(), 0.01 * numbers(ROWS, OUT, seed=12)
    step(made, x, grad, recipe)
    step(made, x, grad, recipe)
    forward, backward = scales(made, "scaling_fwd"), scales(made, "scaling_bwd")
    out, normalized = step(made, x, grad, recipe)

    n8, w8 = rounded(normalized.detach(), forward[INPUT], E4M3), rounded(made.weight.detach(), forward[WEIGHT], E4M3)
    g8 = rounded(grad, backward[GRAD_OUTPUT], E5M2)
    assert_close(out.detach(), n8 @ w8.t() + made.bias.detach().bfloat16().double())
    assert_close(made.weight.grad, g8.t() @ n8)
    x64 = x.detach().double().requires_grad_()
    gamma, beta = (p.detach().double().requires_grad_() for p in (made.layer_norm_weight, made.layer_norm_bias))
    reference = torch.nn.functional.layer_norm(x64, [IN], gamma, beta, made.eps)
    assert_close(normalized.detach(), reference.detach())
    reference.backward(g8 @ w8)
    for actual, expected in [
        (x.grad, x64.grad),
        (made.layer_norm_weight.grad, gamma.grad),
        (made.layer_norm_bias.grad, beta.grad),
    ]:
        assert (actual.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=4), Float8CurrentScaling()], ids=["delayed", "now"])
def test_weight_is_quantized_once_for_all_micro_batches(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = module("Linear", torch.bfloat16)
    quantized = []
    original = tex.quantize

    def counting(tensor: torch.Tensor, *rest: Any) -> Any:
        quantized.append(tensor.shape == made.weight.shape)
        return original(tensor, *rest)

    monkeypatch.setattr(tex, "quantize", counting)
    x, grad = numbers(ROWS, IN, seed=11, dtype=torch.bfloat16).requires_grad_(), numbers(ROWS, OUT, seed=12).bfloat16()
    outputs = []
    for micro_batch in range(3):
        outputs.append(step(made, x, grad, recipe, is_first_microbatch=micro_batch == 0))
        assert sum(quantized) == 1
        if micro_batch == 0:
            input_gradient = x.grad
        with torch.no_grad():
            made.weight.mul_(2)
    # Later micro-batches use the cached weight, in forward and in backward, ...
    assert torch.equal(outputs[1], outputs[2])
    if not recipe.delayed():
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(x.grad, input_gradient)
    # ... and the next step the new one, its transpose for backward included.
    fresh = module("Linear", torch.bfloat16)
    with torch.no_grad():
        fresh.weight.copy_(made.weight)
    if not recipe.delayed():
        again = step(made, x, grad, recipe, is_first_microbatch=True)
        input_gradient = x.grad
        assert torch.equal(again, step(fresh, x, grad, recipe))
        assert torch.equal(input_gradient, x.grad)
    else:
        step(made, x, grad, recipe, is_first_microbatch=True)
    assert sum(quantized) == (2 if recipe.delayed() else 3)


def test_the_amax_of_all_micro_batches_counts() -> None:
    made = module("Linear", torch.float32, bias=False)
    recipe = DelayedScaling(amax_history_len=4)
    grad = torch.ones(ROWS, OUT)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        outputs = [made(torch.full((ROWS, IN), amax), is_first_microbatch=amax == 3) for amax in (3.0, 9.0, 2.0)]
    for output in outputs:
        output.backward(grad)
    step(made, torch.ones(ROWS, IN, requires_grad=True), grad, recipe)
    assert 9.0 in made.fp8_meta["scaling_fwd"].amax_history[:, INPUT].tolist()
    assert scales(made, "scaling_fwd")[INPUT] == pytest.approx(448 / 9, rel=1e-6)


@pytest.mark.parametrize("fp8", [False, True])
def test_weight_gradient_goes_into_main_grad(fp8: bool) -> None:
    made = module("Linear", torch.bfloat16, bias=False, fuse_wgrad_accumulation=True)
    made.weight.main_grad = torch.full((OUT, IN), 0.5)
    plain = module("Linear", torch.bfloat16, bias=False)
    x, grad = numbers(ROWS, IN, seed=11, dtype=torch.bfloat16).requires_grad_(), numbers(ROWS, OUT, seed=12).bfloat16()
    for target in (made, plain):
        with te.fp8_autocast(enabled=fp8, fp8_recipe=DelayedScaling()):
            out = target(x)
        out.backward(grad)
    accumulated = made.weight.main_grad - 0.5
    assert made.weight.main_grad.dtype == torch.float32
    assert (accumulated - plain.weight.grad.float()).norm() <= 2.0**-8 * accumulated.norm()
    # Not rounded to BF16 on the way.
    assert not torch.equal(made.weight.main_grad.bfloat16().float(), made.weight.main_grad)
