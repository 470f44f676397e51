"""Fused attention of the stand-in against explicit softmax in float64, through TE's own Python wrappers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

te = pytest.importorskip("transformer_engine.pytorch")
from transformer_engine.pytorch.attention.dot_product_attention import backends, dot_product_attention  # noqa: E402
from transformer_engine.pytorch.cpp_extensions import fused_attn  # noqa: E402

BACKEND = fused_attn.FusedAttnBackend.F16_arbitrary_seqlen
HEAD_DIM = 8


def allowed(sq: int, sk: int, causal: bool, window: tuple[int, int], bottom_right: bool) -> torch.Tensor:
    """Bool `[sq, sk]`: query i sits at key i, or at key i + sk - sq with the bottom-right diagonal."""
    distance = torch.arange(sk)[None, :] - torch.arange(sq)[:, None] - (sk - sq if bottom_right else 0)
    ok = torch.ones(sq, sk, dtype=torch.bool)
    if causal:
        ok &= distance <= 0
    if window[0] >= 0:
        ok &= distance >= -window[0]
    if window[1] >= 0:
        ok &= distance <= window[1]
    return ok


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ok: torch.Tensor, scale: float, keep: Any = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[s, h, d]` and log-sum-exp `[s, h]` of one sequence, float64; k, v have h or fewer heads."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(~ok, -math.inf)
    probabilities = torch.nan_to_num(scores.softmax(dim=-1)) * keep
    return torch.einsum("hqk,khd->qhd", probabilities, v), scores.logsumexp(dim=-1).transpose(0, 1)


class Sequences:
    """Random q, k, v of several sequences, laid out and packed as TE's layout name says."""

    def __init__(
        self, layout: str, lengths: list[tuple[int, int]], heads: tuple[int, int], dtype: torch.dtype, gap: int
    ):
        torch.manual_seed(len(layout) + sum(map(sum, lengths)))
        self.layout, self.lengths, self.gap = layout, lengths, gap
        self.format = "".join(c for c in layout.split("_")[0] if c.isalpha())
        self.max = tuple(max(n) for n in zip(*lengths, strict=True))
        self.tensors: list[torch.Tensor] = []
        for part in layout.split("_"):
            count = next((int(c) for c in part if c.isdigit()), 1)
            side = 0 if not self.tensors else 1
            shape = self.shape(side, heads[side])
            axis = next((i for i, c in enumerate(part) if c.isdigit()), 0)
            packed = torch.randn(*shape[:axis], count, *shape[axis:]).to(dtype)
            self.tensors += list(packed.unbind(axis))

    def shape(self, side: int, heads: int) -> tuple[int, ...]:
        if self.format == "thd":
            return (sum(n[side] + self.gap for n in self.lengths), heads, HEAD_DIM)
        sizes = (self.max[side], len(self.lengths))
        return (*(sizes if self.format == "sbhd" else sizes[::-1]), heads, HEAD_DIM)

    def cu_seqlens(self, side: int, padded: bool = False) -> torch.Tensor:
        lengths = [0] + [n[side] + (self.gap if padded else 0) for n in self.lengths]
        return torch.tensor(lengths).cumsum(0).to(torch.int32)

    def sequence(self, tensor: torch.Tensor, side: int, index: int) -> torch.Tensor:
        """`[s, h, d]` of one sequence, a view."""
        length = self.lengths[index][side]
        if self.format == "thd":
            start = int(self.cu_seqlens(side, padded=True)[index])
            return tensor[start : start + length]
        batch_first = tensor if self.format == "bshd" else tensor.transpose(0, 1)
        return batch_first[index, :length]

    def lse(self, stats: torch.Tensor, index: int) -> torch.Tensor:
        """`[s, h]` of one sequence from TE's softmax statistics."""
        if self.format == "thd":
            return self.sequence(stats, 0, index).squeeze(-1)
        return stats[index, :, : self.lengths[index][0], 0].transpose(0, 1)


def run(data: Sequences, mask: str, window: tuple[int, int], **options: Any) -> dict[str, Any]:
    q, k, v = data.tensors
    lengths = (*data.max, data.cu_seqlens(0), data.cu_seqlens(1))
    common = {
        "cu_seqlens_q_padded": data.cu_seqlens(0, padded=True),
        "cu_seqlens_kv_padded": data.cu_seqlens(1, padded=True),
        "attn_scale": 0.3,
        "qkv_layout": data.layout,
        "o_format": data.format,
        "attn_mask_type": mask,
        "window_size": window,
        "dropout": options.get("dropout", 0.0),
    }
    generator = torch.Generator("cuda").manual_seed(11)
    out, aux = fused_attn.fused_attn_fwd(True, *lengths, q, k, v, q.dtype, BACKEND, rng_gen=generator, **common)
    grad = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(3)).to(out.dtype)
    grads = fused_attn.fused_attn_bwd(
        *lengths, q, k, v, out, grad, q.dtype, aux, BACKEND, do_format=data.format, dqkv_layout=data.layout, **common
    )
    return {"out": out, "stats": aux[0], "grad": grad, "grads": grads[:3]}


def compare(data: Sequences, results: dict[str, Any], ok_of: Any, tolerance: float, keep_of: Any = None) -> None:
    for index, (sq, sk) in enumerate(data.lengths):
        if sq == 0:
            continue
        sides = (0, 1, 1)
        q, k, v = (
            data.sequence(x, side, index).double().requires_grad_() for x, side in zip(data.tensors, sides, strict=True)
        )
        keep = 1.0 if keep_of is None else keep_of(index)
        out, lse = reference(q, k, v, ok_of(sq, sk), 0.3, keep)
        out.backward(data.sequence(results["grad"], 0, index).double())
        scale = max(1.0, v.detach().abs().max().item())
        assert (data.sequence(results["out"], 0, index) - out).abs().max() < tolerance * scale
        torch.testing.assert_close(data.lse(results["stats"], index).double(), lse, atol=1e-5, rtol=1e-5)
        for name, leaf, grad, side in zip("qkv", (q, k, v), results["grads"], sides, strict=True):
            got = data.sequence(grad, side, index).double()
            assert leaf.grad is not None
            error = (got - leaf.grad).abs().max() / max(1.0, leaf.grad.abs().max().item())
            assert error < tolerance, f"d{name} of sequence {index}: {error}"


MASKS = ["no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right"]
LAYOUTS = [
    *("sb3hd", "sbh3d", "sbhd_sb2hd", "sbhd_sbh2d", "sbhd_sbhd_sbhd"),
    *("bs3hd", "bsh3d", "bshd_bs2hd", "bshd_bsh2d", "bshd_bshd_bshd"),
    *("t3hd", "th3d", "thd_t2hd", "thd_th2d", "thd_thd_thd"),
]


# TE packs sequences only with padding masks.
LAYOUTS_WITH_MASKS = [
    (layout, mask) for layout in LAYOUTS for mask in MASKS if "padding" in mask or not layout.startswith("t")
]


@pytest.mark.parametrize(("layout", "mask"), LAYOUTS_WITH_MASKS)
def test_every_layout_and_mask(layout: str, mask: str) -> None:
    padded = "padding" in mask
    one_tensor = "3" in layout
    lengths = [(7, 7), (4, 4), (5, 5)] if one_tensor else [(7, 9), (4, 6), (5, 8)]
    if not padded:
        lengths = [lengths[0]] * 3
    data = Sequences(layout, lengths, (4, 4 if one_tensor else 2), torch.float32, gap=2)
    results = run(data, mask, (-1, 0) if "causal" in mask else (-1, -1))
    compare(data, results, lambda sq, sk: allowed(sq, sk, "causal" in mask, (-1, -1), "bottom" in mask), 2e-6)
    for tensor, grad in zip(data.tensors, results["grads"], strict=True):
        assert grad.stride() == tensor.stride(), "gradients are packed as their tensors are"


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=2),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3)]),
    mask=st.sampled_from(["padding", "padding_causal", "padding_causal_bottom_right"]),
    window=st.tuples(st.integers(-1, 200), st.integers(-1, 50)),
    thd=st.booleans(),
)
def test_lengths_groups_and_windows(
    lengths: list[tuple[int, int]], heads: tuple[int, int], mask: str, window: tuple[int, int], thd: bool
) -> None:
    data = Sequences("thd_thd_thd" if thd else "sbhd_sbhd_sbhd", lengths, heads, torch.float32, gap=1)
    results = run(data, mask, window)
    causal, bottom = "causal" in mask, "bottom" in mask
    bounds = (window[0], 0 if causal else window[1])
    compare(data, results, lambda sq, sk: allowed(sq, sk, causal, bounds, bottom), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_16_bit_inputs_are_rounded_once(dtype: torch.dtype, mask: str) -> None:
    data = Sequences("sbhd_sbhd_sbhd", [(33, 33)] * 2, (4, 2), dtype, gap=0)
    results = run(data, mask, (-1, -1))
    assert results["out"].dtype == dtype
    assert all(grad.dtype == dtype for grad in results["grads"])
    # The saved output that the backward pass reads is rounded too, as TE's is.
    compare(
        data, results, lambda sq, sk: allowed(sq, sk, mask == "causal", (-1, -1), False), 2 * torch.finfo(dtype).eps
    )


def test_padding_and_attention_to_nothing_give_zeros() -> None:
    data = Sequences("sbhd_sbhd_sbhd", [(6, 2), (3, 5)], (2, 2), torch.float32, gap=0)
    results = run(data, "padding_causal_bottom_right", (-1, 0))
    # Of 6 queries on 2 keys, the first 4 lie before the first key.
    assert results["out"][:4, 0].eq(0).all()
    assert results["out"][4:, 0].ne(0).all()
    assert results["out"][3:, 1].eq(0).all()
    dq, dk, _ = results["grads"]
    assert dq[:4, 0].eq(0).all()
    assert dk[2:, 0].eq(0).all()
    assert all(grad.isfinite().all() for grad in results["grads"])


@pytest.mark.parametrize("layout", ["sbhd_sbhd_sbhd", "thd_thd_thd"])
@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
def test_dropout_masks_of_forward_and_backward_are_the_same(layout: str, mask: str) -> None:
    data = Sequences(layout, [(150, 150), (150, 150), (130, 130)], (2, 1), torch.float32, gap=0)
    results = run(data, mask, (-1, -1), dropout=0.25)
    # With the identity for values the output is the dropped-out probabilities themselves.
    spread = Sequences(layout, data.lengths, (2, 1), torch.float32, gap=0)
    keys = spread.max[1]
    spread.tensors[:2] = data.tensors[:2]
    spread.tensors[2] = torch.zeros(*data.tensors[2].shape[:-1], keys)
    for index, (_, sk) in enumerate(spread.lengths):
        spread.sequence(spread.tensors[2], 1, index)[:, 0, :sk] = torch.eye(sk)
    dropped = run(spread, mask, (-1, -1), dropout=0.25)["out"]

    def keep_of(index: int) -> torch.Tensor:
        sk = data.lengths[index][1]
        keep = spread.sequence(dropped, 0, index)[:, :, :sk].transpose(0, 1) != 0
        fraction = keep.float().mean() * (2 if "causal" in mask else 1)
        assert 0.7 < fraction < 0.8
        return keep.double() / 0.75

    compare(data, results, lambda sq, sk: allowed(sq, sk, "causal" in mask, (-1, -1), False), 1e-5, keep_of)
    assert not torch.equal(keep_of(0), keep_of(1)), "sequences have masks of their own"


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("mask", "window", "dropout"),
    [("causal", (-1, 0), 0.0), ("no_mask", (-1, -1), 0.0), ("causal", (-1, 0), 0.1), ("causal", (64, 0), 0.0)],
)
def test_no_tensor_of_queries_by_keys(dtype: torch.dtype, mask: str, window: tuple[int, int], dropout: float) -> None:
    length = 1024
    module = te.DotProductAttention(
        1, HEAD_DIM, attention_dropout=dropout, qkv_format="sbhd", attn_mask_type=mask, window_size=window
    )
    q, k, v = (torch.randn(length, 1, 1, HEAD_DIM).to(dtype).requires_grad_() for _ in range(3))
    with Largest() as largest:
        module(q, k, v).sum().backward()
    assert largest.elements <= length * length // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_te_takes_the_fused_kernel_for_every_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unfused attention ran")

    monkeypatch.setattr(backends.UnfusedDotProductAttention, "_forward", refuse)
    module = te.DotProductAttention(4, HEAD_DIM, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="causal")
    q = torch.randn(2, 5, 4, HEAD_DIM, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, 5, 2, HEAD_DIM, dtype=dtype, requires_grad=True) for _ in range(2))
    module(q, k, v).sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0


def test_unfused_path_can_still_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for fused in ("0", "1"):
        monkeypatch.setenv("NVTE_FUSED_ATTN", fused)
        dot_product_attention._attention_backends["backend_selection_requires_update"] = True
        torch.manual_seed(0)
        q, k, v = (torch.randn(9, 2, 4, HEAD_DIM, requires_grad=True) for _ in range(3))
        module = te.DotProductAttention(4, HEAD_DIM, qkv_format="sbhd", attn_mask_type="causal")
        out = module(q, k, v)
        out.sum().backward()
        results.append((out.detach(), q.grad))
    for unfused, fused_result in zip(*results, strict=True):
        torch.testing.assert_close(unfused, fused_result, atol=1e-6, rtol=1e-5)


def test_dropout_follows_the_generator() -> None:
    module = te.DotProductAttention(2, HEAD_DIM, attention_dropout=0.5, qkv_format="sbhd", attn_mask_type="causal")
    q, k, v = (torch.randn(9, 2, 2, HEAD_DIM) for _ in range(3))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(module(q, k, v))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert torch.equal(module.eval()(q, k, v), module(q, k, v))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"attn_bias_type": "alibi"}, "NVTE_ALIBI"),
        ({"return_max_logit": True}, "return_max_logit"),
    ],
)
def test_what_is_missing_says_its_name(options: dict[str, Any], name: str) -> None:
    x = torch.randn(4, 1, 2, HEAD_DIM)
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=name):
        fused_attn.fused_attn_fwd(
            True, 4, 4, lengths, lengths, x, x, x, x.dtype, BACKEND, qkv_layout="sbhd_sbhd_sbhd", **options
        )
