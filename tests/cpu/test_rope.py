"""Fused rotary embedding against TE's own unfused functions and float64 autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

te = pytest.importorskip("transformer_engine.pytorch")
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch.attention import rope as te_rope  # noqa: E402

MAX_POSITIONS = 64


def angles(features: int, interleaved: bool) -> torch.Tensor:
    """`[s2, 1, 1, features]`, as `RotaryPositionEmbedding` makes them."""
    return te_rope.RotaryPositionEmbedding(features, interleaved=interleaved)(MAX_POSITIONS)


def exact(x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotation of x `[tokens, h, d]` at `positions` `[tokens]` in float64, pair by pair as a complex product."""
    rotated = freqs.shape[-1]
    pairs = rotated // 2
    angle = freqs.double()[positions, 0, 0]
    angle = angle[:, ::2] if interleaved else angle[:, :pairs]
    part = x.double()[..., :rotated]
    real, imaginary = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :pairs], part[..., pairs:])
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    if interleaved:
        result = torch.view_as_real(turned).flatten(-2)
    else:
        result = torch.cat((turned.real, turned.imag), dim=-1)
    return torch.cat((result, x.double()[..., rotated:]), dim=-1)


def check(x: torch.Tensor, positions: torch.Tensor, flatten: Any, freqs: torch.Tensor, **options: Any) -> None:
    """Forward and backward of one call against `exact`; `flatten` makes `[tokens, h, d]` of x's shape."""
    x = x.requires_grad_()
    out = te_rope.apply_rotary_pos_emb(x, freqs, fused=True, **options)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert out.is_contiguous()
    grad = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1)).to(out.dtype)
    out.backward(grad)
    reference = x.detach().double().requires_grad_()
    wanted = exact(flatten(reference), positions, freqs, options["interleaved"])
    wanted.backward(flatten(grad).double())
    assert x.grad is not None
    assert reference.grad is not None
    tolerance = 8 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(flatten(out).double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x.grad.double(), reference.grad, rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3)),
    features=st.sampled_from([(8, 8), (8, 4), (6, 6), (10, 2)]),
    tensor_format=st.sampled_from(["sbhd", "bshd"]),
    interleaved=st.booleans(),
    starts=st.booleans(),
    strided=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_dense(
    sizes: tuple[int, int, int],
    features: tuple[int, int],
    tensor_format: str,
    interleaved: bool,
    starts: bool,
    strided: bool,
    dtype: torch.dtype,
) -> None:
    s, b, h = sizes
    head_dim, rotated = features
    shape = (s, b) if tensor_format == "sbhd" else (b, s)
    x = torch.randn(*shape, h, 3 * head_dim, generator=torch.Generator("cuda").manual_seed(s)).to(dtype)
    x = x[..., :head_dim] if strided else x[..., :head_dim].contiguous()
    start_positions = torch.arange(b, dtype=torch.int32) * 5 if starts else None

    def flatten(tensor: torch.Tensor) -> torch.Tensor:
        sequence_first = tensor if tensor_format == "sbhd" else tensor.transpose(0, 1)
        return sequence_first.reshape(s * b, h, head_dim)

    offset = torch.zeros(b, dtype=torch.int64) if start_positions is None else start_positions.long()
    positions = (torch.arange(s).unsqueeze(1) + offset).flatten()
    options = {"tensor_format": tensor_format, "start_positions": start_positions, "interleaved": interleaved}
    check(x.detach(), positions, flatten, angles(rotated, interleaved), **options)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("starts", [None, [3, 0, 7]])
def test_packed_sequences(starts: list[int] | None, interleaved: bool) -> None:
    lengths = [4, 6, 1]
    x = torch.randn(sum(lengths), 2, 8)
    offsets = starts or [0, 0, 0]
    positions = torch.cat([torch.arange(n) + offset for n, offset in zip(lengths, offsets, strict=True)])
    options = {
        "tensor_format": "thd",
        "cu_seqlens": torch.tensor([0, 4, 10, 11], dtype=torch.int32),
        "start_positions": None if starts is None else torch.tensor(starts, dtype=torch.int32),
        "interleaved": interleaved,
    }
    check(x, positions, lambda tensor: tensor, angles(8, interleaved), **options)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
def test_context_parallel_ranks_agree_with_te_unfused(tensor_format: str, cp_size: int) -> None:
    freqs = angles(8, False)
    shape = {"sbhd": (4, 2), "bshd": (2, 4), "thd": (8,)}[tensor_format]
    cu_seqlens = torch.tensor([0, 6 * cp_size, 8 * cp_size], dtype=torch.int32) if tensor_format == "thd" else None
    for cp_rank in range(cp_size):
        x = torch.randn(*shape, 2, 8)
        fused, unfused = (
            te_rope.apply_rotary_pos_emb(
                x,
                freqs,
                tensor_format=tensor_format,
                fused=fused,
                cu_seqlens=cu_seqlens,
                cp_size=cp_size,
                cp_rank=cp_rank,
            )
            for fused in (True, False)
        )
        torch.testing.assert_close(fused, unfused, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_joint_qkv_is_split_and_two_rotations(cp_size: int, tensor_format: str, interleaved: bool) -> None:
    groups, heads_per_group, size = 2, 3, 8
    split = [heads_per_group * size, size, size]
    q_freqs, k_freqs = angles(size, interleaved), angles(4, interleaved)
    data = torch.randn(4, 2, groups, sum(split))
    options = {"tensor_format": tensor_format, "interleaved": interleaved, "cp_size": cp_size, "cp_rank": cp_size - 1}
    joint_input, separate_input = data.clone().requires_grad_(), data.clone().requires_grad_()
    joint = te_rope.apply_fused_qkv_rotary_pos_emb(joint_input, q_freqs, k_freqs, split, **options)
    q, k, v = separate_input.split(split, dim=-1)
    q = q.reshape(4, 2, groups * heads_per_group, size)
    separate = (
        te_rope.apply_rotary_pos_emb(q, q_freqs, fused=True, **options),
        te_rope.apply_rotary_pos_emb(k, k_freqs, fused=True, **options),
        v,
    )
    grads = [torch.randn(out.shape) for out in joint]
    for a, b in zip(joint, separate, strict=True):
        assert torch.equal(a, b)
    torch.autograd.backward(joint, grads)
    torch.autograd.backward(separate, grads)
    assert torch.equal(joint_input.grad, separate_input.grad)


@pytest.mark.parametrize("rotated", [32, 16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_results_are_contiguous_whatever_the_input_is(interleaved: bool, rotated: int) -> None:
    freqs = torch.randn(64, 1, 1, rotated, device="cuda")
    lengths = torch.tensor([0, 40, 64], dtype=torch.int32, device="cuda")
    x = torch.randn(4, 64, 32, device="cuda").transpose(0, 1)
    for function in (tex.fused_rope_forward, tex.fused_rope_backward):
        packed = function(x, freqs, None, tex.NVTE_QKV_Format.NVTE_THD, interleaved, lengths, 1, 0)
        assert packed.is_contiguous()
        padded = function(
            x.unsqueeze(1).transpose(2, 3).contiguous().transpose(2, 3),
            *(freqs, None, tex.NVTE_QKV_Format.NVTE_SBHD, interleaved, None, 1, 0),
        )
        assert padded.is_contiguous()


SBHD, THD = tex.NVTE_QKV_Format.NVTE_SBHD, tex.NVTE_QKV_Format.NVTE_THD


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda")


FREQS, LENGTHS = zeros(8, 1, 1, 4), torch.tensor([0, 8], dtype=torch.int32, device="cuda")


def rope(
    shape: tuple[int, ...],
    freqs: torch.Tensor = FREQS,
    kind: Any = SBHD,
    starts: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    cp_size: int = 1,
) -> list[Callable[[], Any]]:
    functions = (tex.fused_rope_forward, tex.fused_rope_backward)
    return [lambda f=f: f(zeros(*shape), freqs, starts, kind, False, lengths, cp_size, 0) for f in functions]


def joint(qkv: torch.Tensor, q_freqs: torch.Tensor = FREQS, k_freqs: torch.Tensor = FREQS) -> list[Callable[[], Any]]:
    return [lambda: tex.fused_qkv_rope_forward(qkv, q_freqs, k_freqs, None, [8, 4, 4], SBHD, False, 1, 0)]


BF16_FREQS, WIDE_FREQS = FREQS.bfloat16(), zeros(8, 2, 1, 4)
# By name: the calls, and words of TE's error.
REFUSED: dict[str, tuple[list[Callable[[], Any]], str]] = {
    "freqs of 2 axes": (rope((8, 1, 2, 4), FREQS.view(8, 4)), "expected 4D tensor of freqs"),
    "freqs for each sequence": (rope((8, 1, 2, 4), WIDE_FREQS), "second and third dims"),
    "BF16 freqs": (rope((8, 1, 2, 4), BF16_FREQS), "Dtype of the freqs tensor"),
    "3 axes": (rope((8, 2, 4)), "expected 4D tensor"),
    "thd of 4 axes": (rope((8, 1, 2, 4), kind=THD, lengths=LENGTHS), "expected 3D tensor"),
    "thd without lengths": (rope((8, 2, 4), kind=THD), "expected cu_seqlens"),
    "lengths of 2 axes": (rope((8, 2, 4), kind=THD, lengths=LENGTHS.view(1, 2)), "1D tensor of cu_seqlens"),
    "starts of 2 axes": (rope((8, 1, 2, 4), starts=LENGTHS.view(1, 2)), "1D tensor of start_positions"),
    "too long": (rope((9, 1, 2, 4)), "longer sequence length"),
    "too long on all ranks": (rope((6, 1, 2, 4), cp_size=2), "longer sequence length"),
    "more angles than features": (rope((8, 1, 2, 2)), "equals or is greater"),
    "more angles than features of thd": (rope((8, 2, 2), kind=THD, lengths=LENGTHS), "equals or is greater"),
    "joint in BF16 freqs": (joint(zeros(8, 1, 1, 16), k_freqs=BF16_FREQS), "Dtype of the freqs tensor"),
    "joint of 3 axes": (joint(zeros(8, 1, 16)), "expected 4D input tensor"),
    "joint out of order": (joint(zeros(1, 8, 1, 16).expand(8, 8, 1, 16)), "must be contiguous"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_te_refuses_is_refused(name: str) -> None:
    calls, words = REFUSED[name]
    for call in calls:
        with pytest.raises(RuntimeError, match=words):
            call()
