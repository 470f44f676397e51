"""Multi-tensor functions and TE's FusedAdam and FusedSGD on them, against torch's optimizers, numpy and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

te = pytest.importorskip("transformer_engine.pytorch")
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD, multi_tensor_applier  # noqa: E402

SHAPES = [(7,), (33, 5), (3000,), (1,)]
LR, BETAS, EPSILON = 1e-2, (0.9, 0.95), 1e-8


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(t) for t in tensors(dtype)]


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    for parameter, gradient in zip(params, tensors(parameter_dtype(params), seed=step + 1), strict=True):
        parameter.grad = gradient.clone()


def parameter_dtype(params: list[torch.nn.Parameter]) -> torch.dtype:
    return params[0].dtype


def numpy_adam(
    g: Any, p: Any, m: Any, v: Any, step: int, mode: int, bias_correction: bool, decay: float, dtype: Any
) -> tuple[Any, Any, Any]:
    """One update in the order of TE's kernel (`multi_tensor/adam.cu`), every operation rounded to `dtype`."""
    f = dtype
    g, p, m, v = (np.asarray(x, dtype=f) for x in (g, p, m, v))
    if mode == 0:
        g = g + f(decay) * p
    m = f(BETAS[0]) * m + f(1 - BETAS[0]) * g
    v = f(BETAS[1]) * v + f(1 - BETAS[1]) * g * g
    corrections = [1 - beta**step if bias_correction else 1.0 for beta in BETAS]
    update = (m / f(corrections[0])) / (np.sqrt(v / f(corrections[1])) + f(EPSILON))
    if mode == 1:
        update = update + f(decay) * p
    return p - f(LR) * update, m, v


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_adam_update(mode: int, bias_correction: bool, decay: float) -> None:
    """Within 4 units in the last place of the largest term of FP64, which bounds any order of the FP32 operations."""
    p, g, m = tensors(seed=1), tensors(seed=2), tensors(seed=3)
    v = [t.square() for t in tensors(seed=4)]
    before = [[t.double().cpu().numpy().copy() for t in group] for group in (g, p, m, v)]
    arguments = (LR, *BETAS, EPSILON, 5, mode, int(bias_correction), decay)
    multi_tensor_applier(tex.multi_tensor_adam, torch.zeros(1, dtype=torch.int), [g, p, m, v], *arguments)
    for index in range(len(p)):
        old = [group[index] for group in before]
        exact = numpy_adam(*old, 5, mode, bias_correction, decay, np.float64)
        for name, got, wanted, start in zip("pmv", (p, m, v), exact, old[1:], strict=True):
            terms = np.abs(start) + np.abs(wanted) + np.abs(old[0]) ** (2 if name == "v" else 1)
            error = np.abs(got[index].double().cpu().numpy() - wanted)
            assert (error <= 4 * 2.0**-24 * terms + 1e-12).all(), name


@pytest.mark.parametrize("mode", [0, 1])
def test_adam_with_low_precision_moments_follows_te_kernel(mode: int) -> None:
    """Not the fused kernel: the operations of TE's kernel one by one, rounded to BF16 at the end only."""
    g, p = tensors(seed=2), tensors(seed=1)
    m, v = tensors(torch.bfloat16, 3), [t.square() for t in tensors(torch.bfloat16, 4)]
    before = [[t.float().cpu().numpy().copy() for t in group] for group in (g, p, m, v)]
    arguments = (LR, *BETAS, EPSILON, 5, mode, 1, 0.1)
    multi_tensor_applier(tex.multi_tensor_adam, torch.zeros(1, dtype=torch.int), [g, p, m, v], *arguments)
    for index in range(len(p)):
        exact = numpy_adam(*(group[index] for group in before), 5, mode, True, 0.1, np.float32)
        for got, wanted in zip((p, m, v), exact, strict=True):
            rounded = torch.from_numpy(np.asarray(wanted)).to(got[index].dtype).cuda()
            torch.testing.assert_close(
                got[index], rounded, rtol=2**-7 if rounded.dtype.itemsize == 2 else 1e-5, atol=1e-6
            )
            # Fused multiply-adds differ in the last FP32 bit, which BF16 almost never shows.
            assert (got[index] == rounded).float().mean() > (0.97 if rounded.dtype.itemsize == 2 else 0.3)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("adam_w", [True, False])
def test_fused_adam_follows_torch(adam_w: bool, decay: float) -> None:
    ours, theirs = parameters(), parameters()
    options = {"lr": LR, "betas": BETAS, "eps": EPSILON, "weight_decay": decay}
    fused = FusedAdam(ours, adam_w_mode=adam_w, **options)
    torch_type = torch.optim.AdamW if adam_w else torch.optim.Adam
    reference = torch_type(theirs, foreach=False, **options)
    for step in range(20):
        for params, optimizer in ((ours, fused), (theirs, reference)):
            set_gradients(params, step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_masters_are_what_an_fp32_optimizer_would_hold() -> None:
    low, full = parameters(torch.bfloat16), [torch.nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    with_masters = FusedAdam(low, lr=LR, master_weights=True)
    reference = FusedAdam(full, lr=LR)
    for step in range(5):
        set_gradients(low, step)
        for a, b in zip(low, full, strict=True):
            b.grad = a.grad.float()
        with_masters.step()
        reference.step()
    for a, b in zip(low, full, strict=True):
        assert torch.equal(with_masters.state[a]["master_param"], b)
        assert torch.equal(a, b.bfloat16())


def test_param_remainders_hold_the_masters_exactly() -> None:
    plain, split = parameters(torch.bfloat16), parameters(torch.bfloat16)
    masters = FusedAdam(plain, lr=LR, master_weights=True)
    remainders = FusedAdam(split, lr=LR, master_weights=True, store_param_remainders=True)
    for step in range(5):
        for params, optimizer in ((plain, masters), (split, remainders)):
            set_gradients(params, step)
            optimizer.step()
    for a, b in zip(plain, split, strict=True):
        low = remainders.state[b]["master_param"].to(torch.int32)
        high = b.detach().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
        assert torch.equal(((high << 16) | (low & 0xFFFF)).view(torch.float32), masters.state[a]["master_param"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("master_weights", [True, False])
def test_capturable_is_the_same_and_skips_overflows(dtype: torch.dtype, master_weights: bool) -> None:
    plain, capturable = parameters(dtype), parameters(dtype)
    one = FusedAdam(plain, lr=LR, master_weights=master_weights)
    two = FusedAdam(capturable, lr=LR, master_weights=master_weights, capturable=True)
    for step in range(3):
        for params, optimizer in ((plain, one), (capturable, two)):
            set_gradients(params, step)
            optimizer.step()
    for a, b in zip(plain, capturable, strict=True):
        assert torch.equal(a, b)
    lists = [tensors(seed=9), tensors(seed=8), tensors(seed=7), [t.square() for t in tensors(seed=6)]]
    before = [[t.clone() for t in group] for group in lists]
    step_tensor, learning_rate = torch.tensor([3], dtype=torch.int), torch.tensor(LR)
    arguments = (learning_rate, *BETAS, EPSILON, step_tensor, 1, 1, 0.1, torch.ones(1))
    multi_tensor_applier(tex.multi_tensor_adam_capturable, torch.ones(1, dtype=torch.int), lists, *arguments)
    assert all(torch.equal(a, b) for old, new in zip(before, lists, strict=True) for a, b in zip(old, new, strict=True))


def test_capturable_unscales_gradients() -> None:
    scaled = [tensors(seed=9), tensors(seed=8), tensors(seed=7), [t.square() for t in tensors(seed=6)]]
    plain = [[t.clone() for t in group] for group in scaled]
    for gradient in scaled[0]:
        gradient.mul_(1024)
    for lists, inverse in ((scaled, 2.0**-10), (plain, 1.0)):
        arguments = (torch.tensor(LR), *BETAS, EPSILON, torch.tensor([3]), 1, 1, 0.1, torch.full((1,), inverse))
        multi_tensor_applier(tex.multi_tensor_adam_capturable, torch.zeros(1, dtype=torch.int), lists, *arguments)
    for a, b in zip(scaled, plain, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


def test_fp8_parameters_are_the_masters_quantized() -> None:
    with te.fp8_model_init(enabled=True, recipe=te_recipe()):
        module = te.Linear(32, 32, bias=False)
    optimizer = FusedAdam([module.weight], lr=LR, master_weights=True)
    module.weight.grad = torch.randn(32, 32, generator=torch.Generator("cuda").manual_seed(1))
    optimizer.step()
    master = optimizer.state[module.weight]["master_param"]
    error = (module.weight.dequantize() - master).abs().max() / master.abs().max()
    assert 0 < error < 2**-4


def te_recipe() -> Any:
    from transformer_engine.common.recipe import DelayedScaling

    return DelayedScaling()


@pytest.mark.parametrize(("nesterov", "dampening"), [(True, 0.0), (False, 0.0), (False, 0.5)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_fused_sgd_follows_torch(decay: float, nesterov: bool, dampening: float) -> None:
    ours, theirs = parameters(), parameters()
    options = {"lr": LR, "momentum": 0.9, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov}
    fused, reference = FusedSGD(ours, **options), torch.optim.SGD(theirs, **options)
    for step in range(5):
        for params, optimizer in ((ours, fused), (theirs, reference)):
            set_gradients(params, step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def l2norm_bound(size: int) -> float:
    """Bound of the relative error: an FP32 sum of squares of at most 2,048 values rounds each at most that often, the
    root halves the error, and root and result are rounded once each."""
    return (min(size, 2048) / 2 + 2) * 2.0**-24


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    exponent=st.integers(-12, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_l2norm(sizes: list[int], exponent: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(sum(sizes))
    values = [(torch.randn(n, generator=generator) * 10.0**exponent).to(dtype) for n in sizes]
    flag = torch.zeros(1, dtype=torch.int)
    total, each = multi_tensor_applier(tex.multi_tensor_l2norm, flag, [list(values)], True)
    exact = torch.stack([v.double().norm() for v in values])
    assert total.shape == (1,)
    assert total.dtype == torch.float32
    bounds = torch.tensor([l2norm_bound(n) for n in sizes], dtype=torch.float64)
    assert ((each.double() - exact).abs() <= bounds * exact).all()
    assert abs(total.double() - exact.norm()) <= bounds.max() * exact.norm()
    scaled, _ = multi_tensor_applier(tex.multi_tensor_unscale_l2norm, flag, [values], torch.tensor([0.25]), False)
    torch.testing.assert_close(scaled * 4, total)


def test_l2norm_of_a_large_tensor_does_not_drift() -> None:
    values = torch.rand(2**23, generator=torch.Generator("cuda").manual_seed(0))
    total, _ = tex.multi_tensor_l2norm(2048, torch.zeros(1, dtype=torch.int), [[values]], False)
    assert abs(total.item() / values.double().norm().item() - 1) < 1e-7


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_gradients_are_seen(bad: float) -> None:
    values = tensors()
    values[1][0, 0] = bad
    total, _ = tex.multi_tensor_l2norm(2048, torch.zeros(1, dtype=torch.int), [values], False)
    assert not torch.isfinite(total).all()
    flag = torch.zeros(1, dtype=torch.int)
    tex.multi_tensor_scale(2048, flag, [values, [torch.empty_like(v) for v in values]], 1.0)
    assert flag.item() == 1


def test_huge_but_finite_values_set_no_flag() -> None:
    source = [torch.full((5000,), 3e38)]
    flag = torch.zeros(1, dtype=torch.int)
    out = [torch.empty(5000, dtype=torch.bfloat16)]
    tex.multi_tensor_scale(2048, flag, [source, out], 0.5)
    assert flag.item() == 0
    assert torch.equal(out[0], (source[0] * 0.5).bfloat16())


def test_scale_in_place_and_copy_between_dtypes() -> None:
    values = tensors()
    wanted = [v * 0.3 for v in values]
    tex.multi_tensor_scale(2048, torch.zeros(1, dtype=torch.int), [values, values], 0.3)
    assert all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True))
    copies = [torch.empty_like(v, dtype=torch.bfloat16) for v in values]
    tex.multi_tensor_scale_tensor(2048, torch.zeros(1, dtype=torch.int), [values, copies], torch.ones(1))
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(values, copies, strict=True))


def test_scales_from_amaxes() -> None:
    amaxes = [torch.tensor([x]) for x in (2.0, 0.0, float("inf"), 1e-30)]
    scales, inverses = [torch.zeros(1) for _ in amaxes], [torch.zeros(1) for _ in amaxes]
    flag = torch.zeros(1, dtype=torch.int)
    tex.multi_tensor_compute_scale_and_scale_inv(2048, flag, [amaxes, scales, inverses], 448.0, False, 0.0)
    assert torch.cat(scales).tolist() == pytest.approx([224.0, 1.0, 1.0, 4.48e32])
    assert torch.cat(inverses).tolist() == pytest.approx([1 / 224.0, 1.0, 1.0, 1 / 4.48e32])
    tex.multi_tensor_compute_scale_and_scale_inv(2048, flag, [amaxes, scales, inverses], 448.0, True, 0.0)
    assert scales[0].item() == 128.0


def test_fused_sgd_in_fp16_adds_in_fp16() -> None:
    """TE's kernel rounds `lr * d` to FP16 and then the sum, as CUDA's `half += float` does."""
    generator = torch.Generator("cuda").manual_seed(3)
    p, g, m = (torch.randn(500, generator=generator).half() for _ in range(3))
    before, gradients, momenta = (t.float().cpu().numpy() for t in (p, g, m))
    velocity = momenta * np.float32(0.125) + gradients
    change = np.float32(-0.25) * velocity
    wanted = before.astype(np.float16) + change.astype(np.float16)
    assert (wanted != (before + change).astype(np.float16)).any()
    tex.multi_tensor_sgd(2048, FLAG, [[g], [p], [m]], 0.0, 0.125, 0.0, 0.25, False, False, False, 1.0)
    assert np.array_equal(p.cpu().numpy(), wanted)
    assert np.array_equal(m.cpu().numpy(), velocity.astype(np.float16))


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def zeros(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


FLAG, ONE, ONE_STEP = zeros(1, dtype=torch.int), zeros(1) + 1, zeros(1, dtype=torch.int) + 1


def lists(*dtypes: torch.dtype) -> list[list[torch.Tensor]]:
    return [[zeros(3, 4).to(dtype), zeros(5).to(dtype)] for dtype in dtypes]


def adam(tensor_lists: Any, name: str = "multi_tensor_adam", *more: Any) -> Callable[[], Any]:
    options = (LR, *BETAS, EPSILON, 1, 1, 1, 0.0)
    return lambda: getattr(tex, name)(2048, FLAG, tensor_lists, *options, *more)


def capturable(tensor_lists: Any, name: str = "multi_tensor_adam_capturable") -> Callable[[], Any]:
    options = (ONE, *BETAS, EPSILON, ONE_STEP, 1, 1, 0.0, ONE)
    return lambda: getattr(tex, name)(2048, FLAG, tensor_lists, *options)


def sgd(tensor_lists: Any) -> Callable[[], Any]:
    return lambda: tex.multi_tensor_sgd(2048, FLAG, tensor_lists, 0.0, 0.9, 0.0, LR, False, False, False, 1.0)


def norm(*tensors: torch.Tensor) -> Callable[[], Any]:
    return lambda: tex.multi_tensor_l2norm(2048, FLAG, [list(tensors)], False)


def scale(sources: Any, destinations: Any) -> Callable[[], Any]:
    return lambda: tex.multi_tensor_scale(2048, FLAG, [sources, destinations], 1.0)


FULL = zeros(4, 4)
# By name: the call, and words of TE's error.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no lists": (lambda: tex.multi_tensor_l2norm(2048, FLAG, [], False), "List of tensors is empty"),
    "no tensors": (norm(), "no tensors"),
    "lists of other lengths": (adam([*lists(FP32, FP32, FP32), [FULL]]), "Wrong number of tensors"),
    "three lists": (adam(lists(FP32, FP32, FP32)), "Expected 4 or 5 tensor lists, but found 3"),
    "empty tensor": (norm(zeros(0)), "at least one chunk"),
    "other sizes": (scale([FULL], [zeros(15)]), "elements"),
    "gaps": (norm(zeros(4, 8)[:, :4]), "has gaps"),
    "another order of memory": (scale([FULL], [zeros(4, 4).t()]), "have different strides"),
    "norm of integers": (norm(zeros(4, dtype=torch.int32)), "Unsupported dtype torch.int32"),
    "norm of two dtypes": (norm(FULL, FULL.half()), "Input tensor 1 has dtype"),
    "scaled into FP64": (scale([FULL], [FULL.double()]), "Unsupported dtype torch.float64"),
    "gradients of two dtypes": (
        adam([[zeros(3, 4), zeros(5).half()], *lists(FP32, FP32, FP32)]),
        "Grad tensor 1 has dtype",
    ),
    "FP64 parameters": (adam(lists(FP32, torch.float64, FP32, FP32)), "Unsupported dtype torch.float64"),
    "FP16 moments": (adam(lists(FP32, FP32, FP16, FP16)), "both be Float32 or both be BFloat16"),
    "moments of two dtypes": (adam(lists(FP32, FP32, FP32, BF16)), "both be Float32 or both be BFloat16"),
    "BF16 masters": (adam(lists(FP32, BF16, FP32, FP32, BF16)), "Master param tensor 0"),
    "FP16 with remainders": (
        adam(lists(FP32, FP16, FP32, FP32, torch.int16), "multi_tensor_adam_param_remainder"),
        "Unsupported dtype torch.float16 of Param",
    ),
    "remainders in INT32": (
        adam(lists(FP32, BF16, FP32, FP32, torch.int32), "multi_tensor_adam_param_remainder"),
        "Param remainder tensor 0",
    ),
    "FP8's moments in BF16": (
        adam(lists(FP32, torch.uint8, BF16, BF16, FP32, FP32, FP32, FP32), "multi_tensor_adam_fp8", 4),
        "First moment tensor 0",
    ),
    "capturable of two dtypes": (capturable(lists(FP32, BF16, FP32, FP32)), "Param tensor 0"),
    "capturable with FP16 masters": (
        capturable(lists(BF16, BF16, FP32, FP32, FP16), "multi_tensor_adam_capturable_master"),
        "Master param tensor 0",
    ),
    "SGD in BF16": (sgd(lists(BF16, BF16, BF16)), "Unsupported combination of weight and gradient"),
    "SGD of FP16 with FP32 momentum": (sgd(lists(FP16, FP16, FP32)), "Unsupported combination"),
    "SGD with BF16 copies": (sgd(lists(FP32, FP32, FP32, BF16)), "should always be fp16"),
    "scales in FP64": (
        lambda: tex.multi_tensor_compute_scale_and_scale_inv(
            *(2048, FLAG, lists(torch.float64, FP32, FP32), 448.0, False, 0.0)
        ),
        "Scaling tensor 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_te_refuses_is_refused(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(RuntimeError, match=words):
        call()


def test_tensors_that_lie_alike_are_taken() -> None:
    """A transposed parameter and its gradient, in one order of memory, are walked together."""
    g, p, m, v = (torch.ones(4, 6).t() for _ in range(4))
    adam([[g], [p], [m], [v]])()
    assert (p < 1).all()
