"""Softmax kernels of TE's unfused attention against float64 autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

te = pytest.importorskip("transformer_engine.pytorch")
import transformer_engine_torch as tex  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16]


def causal(scores: torch.Tensor) -> torch.Tensor:
    sq, sk = scores.shape[-2:]
    return scores.masked_fill(torch.ones(sq, sk, dtype=torch.bool).triu(sk - sq + 1), -math.inf)


KERNELS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "scaled_softmax": ((2, 3, 5, 8), lambda scores: scores),
    "scaled_upper_triang_masked_softmax": ((4, 6, 6), causal),
    "scaled_aligned_causal_masked_softmax": ((2, 3, 4, 8), causal),
}


def check(y: torch.Tensor, dx: torch.Tensor, wanted: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> None:
    wanted.backward(dy.double())
    assert x.grad is not None
    tolerance = 4 * torch.finfo(y.dtype).eps
    assert y.dtype == dx.dtype == dy.dtype
    torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dx.double(), x.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_against_autograd(name: str, dtype: torch.dtype) -> None:
    shape, mask = KERNELS[name]
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    y = getattr(tex, f"{name}_forward")(x, 0.7)
    dx = getattr(tex, f"{name}_backward")(dy, y, 0.7)
    leaf = x.double().requires_grad_()
    check(y, dx, torch.softmax(mask(leaf * 0.7), dim=-1), leaf, dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_batch", [1, 2])
def test_masked(dtype: torch.dtype, mask_batch: int) -> None:
    x, dy = torch.randn(2, 3, 5, 8).to(dtype), torch.randn(2, 3, 5, 8).to(dtype)
    mask = torch.rand(mask_batch, 1, 5, 8, generator=torch.Generator("cuda").manual_seed(0)) < 0.4
    mask[0, 0, 0], mask[0, 0, 1] = True, False
    y = tex.scaled_masked_softmax_forward(x, mask, 0.7)
    dx = tex.scaled_masked_softmax_backward(dy, y, 0.7)
    assert y[0, :, 0].eq(0).all(), "a row that is masked wholly attends to nothing"
    leaf = x.double().requires_grad_()
    check(y, dx, torch.nan_to_num(torch.softmax((leaf * 0.7).masked_fill(mask, -math.inf), dim=-1)), leaf, dy)


def test_queries_before_the_first_key_get_zeros() -> None:
    y = tex.scaled_aligned_causal_masked_softmax_forward(torch.randn(1, 1, 11, 8).bfloat16(), 1.0)
    assert y[0, 0, :3].eq(0).all()
    assert y[0, 0, 3].tolist() == [1.0] + [0.0] * 7


def scores(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


PLAIN, UPPER, ALIGNED, MASKED = (
    f"scaled_{kind}softmax_forward" for kind in ("", "upper_triang_masked_", "aligned_causal_masked_", "masked_")
)
LEAST_MASK = torch.zeros(1, 1, 4, 8, dtype=torch.bool)
REFUSED = [
    *[(name, [scores(1, 1, 4, 8, dtype=torch.float32)], "Only fp16 and bf16") for name in (PLAIN, ALIGNED)],
    (UPPER, [scores(1, 4, 4, dtype=torch.float32)], "Only fp16 and bf16"),
    *[(name, [scores(1, 4, 8)], "expected 4D") for name in (PLAIN, ALIGNED)],
    (UPPER, [scores(1, 1, 4, 4)], "expected 3D"),
    *[(name, [scores(1, 1, 4, 12)], "divisible by 8") for name in (PLAIN, ALIGNED)],
    *[(name, [scores(1, 1, 2, 16392)], "16384 or less") for name in (PLAIN, ALIGNED)],
    (PLAIN, [scores(1, 1, 1, 8)], "2 or more"),
    (MASKED, [scores(1, 1, 4, 8, dtype=torch.float32), LEAST_MASK], "Only fp16 and bf16"),
    (MASKED, [scores(1, 1, 1, 8), LEAST_MASK], "2 or more"),
    (MASKED, [scores(3, 1, 4, 8), LEAST_MASK.expand(2, 1, 4, 8)], "does not fit"),
    (MASKED, [scores(1, 2, 4, 8), LEAST_MASK.expand(1, 2, 4, 8)], "does not fit"),
    (MASKED, [scores(1, 1, 4, 8), LEAST_MASK[0]], "does not fit"),
    ("scaled_softmax_backward", [scores(1, 1, 4, 8), scores(1, 1, 4, 8, dtype=torch.float32)], "Only fp16 and bf16"),
]


@pytest.mark.parametrize(("name", "tensors", "words"), REFUSED)
def test_what_the_kernels_refuse(name: str, tensors: list[torch.Tensor], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        getattr(tex, name)(*(tensor.cuda() for tensor in tensors), 1.0)
