"""Windows, sinks, caps and scales of attention through TE's module, fused and not, against autograd in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

te = pytest.importorskip("transformer_engine.pytorch")
from transformer_engine.pytorch.attention.dot_product_attention import backends, dot_product_attention, softmax  # noqa: E402
from transformer_engine.pytorch.cpp_extensions import fused_attn  # noqa: E402

SIZE = 8
EPSILON = {torch.float32: 1e-5, torch.bfloat16: 0.03}


@dataclass(frozen=True)
class Form:
    """An attention; window: keys that a query sees, itself included; lengths: of packed or equally long sequences."""

    lengths: tuple[int, ...]
    heads: int = 4
    groups: int = 2
    window: int | None = None
    softmax: str = "vanilla"
    softcap: float = 0.0
    scale: float | None = None
    dropout: float = 0.0
    packed: bool = False
    value_size: int = SIZE
    dtype: torch.dtype = torch.float32

    def module(self, sinks: torch.Tensor) -> Any:
        module = te.DotProductAttention(
            self.heads,
            (SIZE, self.value_size),
            num_gqa_groups=self.groups,
            attention_dropout=self.dropout,
            qkv_format="thd" if self.packed else "sbhd",
            attn_mask_type="padding_causal" if self.packed else "causal",
            window_size=None if self.window is None else (self.window - 1, 0),
            softmax_type=self.softmax,
            softmax_scale=self.scale,
        )
        if self.softmax == "learnable":
            with torch.no_grad():
                module.softmax_offset.copy_(sinks)
        return module

    def tensors(self) -> list[torch.Tensor]:
        """q, k and v, as long as all sequences one after the other."""
        torch.manual_seed(sum(self.lengths) + self.heads)
        kinds = ((self.heads, SIZE), (self.groups, SIZE), (self.groups, self.value_size))
        return [torch.randn(sum(self.lengths), *kind).to(self.dtype) for kind in kinds]

    def run(self, module: Any, tensors: list[torch.Tensor], seed: int = 0, **more: Any) -> torch.Tensor:
        """`[tokens, h, d]`."""
        torch.manual_seed(seed)
        if self.packed:
            ends = torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)
            places = {**dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ends)}
            places |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(self.lengths))
            out = module(*tensors, softcap=self.softcap, **places, **more)
            return out.view(-1, self.heads, self.value_size)
        batch = len(self.lengths)
        dense = [x.view(batch, -1, *x.shape[1:]).transpose(0, 1).contiguous() for x in tensors]
        out = module(*dense, softcap=self.softcap, **more).view(-1, batch, self.heads, self.value_size)
        return out.transpose(0, 1).reshape(-1, self.heads, self.value_size)


def reference(form: Form, tensors: list[torch.Tensor], sinks: torch.Tensor, keeps: Any = None) -> torch.Tensor:
    """Scores, cap, mask and a softmax over the keys and the sink, one sequence after the other."""
    outs = []
    for index, parts in enumerate(zip(*(x.split(form.lengths) for x in tensors), strict=True)):
        q, k, v = parts
        k, v = (x.repeat_interleave(form.heads // form.groups, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (form.scale or SIZE**-0.5)
        if form.softcap:
            scores = form.softcap * torch.tanh(scores / form.softcap)
        back = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
        hidden = back < 0
        if form.window is not None:
            hidden |= back >= form.window
        scores = scores.masked_fill(hidden, -math.inf)
        if form.softmax != "vanilla":
            column = sinks if form.softmax == "learnable" else torch.zeros_like(sinks)
            scores = torch.cat([scores, column.view(-1, 1, 1).expand(-1, len(q), 1)], dim=-1)
        probabilities = scores.softmax(dim=-1)[..., : len(q)]
        outs.append(torch.einsum("hqk,khd->qhd", probabilities * (1.0 if keeps is None else keeps[index]), v))
    return torch.cat(outs)


def check(form: Form, keeps: Any = None, **more: Any) -> None:
    """Output and every gradient, that of the sinks included."""
    sinks = torch.randn(form.heads, generator=torch.Generator("cuda").manual_seed(5))
    module = form.module(sinks)
    leaves = [x.requires_grad_() for x in form.tensors()]
    out = form.run(module, leaves, **more)
    grad = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(6)).to(form.dtype)
    out.backward(grad)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    exact_sinks = sinks.double().requires_grad_()
    right = reference(form, exact, exact_sinks, keeps)
    right.backward(grad.double())
    found = [("out", out, right), *((f"d{n}", x.grad, y.grad) for n, x, y in zip("qkv", leaves, exact, strict=True))]
    if form.softmax == "learnable":
        found.append(("dsinks", module.softmax_offset.grad, exact_sinks.grad))
    for name, got, wanted in found:
        assert got is not None
        assert wanted is not None
        error = (got.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)
        assert error < EPSILON[form.dtype], f"{name}: {error}"


@st.composite
def forms(draw: st.DrawFn) -> Form:
    packed = draw(st.booleans())
    if packed:
        lengths = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    else:
        lengths = (draw(st.integers(2, 150)),) * draw(st.integers(1, 2))
    heads, groups = draw(st.sampled_from([(1, 1), (4, 4), (4, 1), (6, 3)]))
    return Form(
        lengths,
        heads,
        groups,
        draw(st.none() | st.integers(1, 50)),
        draw(st.sampled_from(["vanilla", "learnable", "off-by-one"])),
        draw(st.sampled_from([0.0, 0.0, 0.5, 30.0])),
        draw(st.sampled_from([None, 0.1, 1.0])),
        packed=packed,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )


@settings(max_examples=120, deadline=None, derandomize=True)
@given(form=forms())
def test_every_form_is_the_reference(form: Form) -> None:
    check(form)


@pytest.mark.parametrize("softcap", [0.0, 0.7], ids=["no cap", "cap"])
@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("window", [None, 20])
def test_dropout_leaves_the_form(packed: bool, softmax: str, softcap: float, window: int | None) -> None:
    form = Form((48, 48), 2, 1, window, softmax, softcap, None, 0.25, packed)
    # With the identity for values the output is the thinned out probabilities, whose masks only the seed decides.
    spread = Form(**{**vars(form), "value_size": 48})
    tensors = form.tensors()
    eyes = torch.eye(48).unsqueeze(1).repeat(2, 1, 1)
    sinks = torch.randn(2, generator=torch.Generator("cuda").manual_seed(5))
    thinned = spread.run(spread.module(sinks), [*tensors[:2], eyes]).view(2, 48, 2, 48).transpose(1, 2)
    keeps = (thinned != 0).double()
    visible = reference(
        Form(**{**vars(spread), "dropout": 0.0}), [*(x.double() for x in tensors[:2]), eyes.double()], sinks.double()
    )
    share = keeps.sum() / (visible > 0).sum()
    assert 0.68 < share < 0.82
    check(form, keeps / 0.75)


def path_of(form: Form, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes: the `fused` kernel, or `unfused` masks and a softmax of all scores."""
    called: list[str] = []

    def watch(owner: Any, name: str, path: str) -> None:
        original = getattr(owner, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            called.append(path)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, spy)

    watch(backends, "fused_attn_fwd", "fused")
    watch(softmax.FusedScaleMaskSoftmax, "forward", "unfused")
    form.run(form.module(torch.zeros(form.heads)), form.tensors())
    (path,) = called
    return path


BF16 = {"lengths": (32, 32), "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"window": 8}, "fused"),
        ({"window": 8, "packed": True}, "fused"),
        ({"softmax": "learnable"}, "fused"),
        ({"softmax": "off-by-one", "window": 8}, "fused"),
        ({"softmax": "learnable", "dropout": 0.1}, "fused"),
        ({"scale": 0.3}, "fused"),
        # TE's rules.
        ({"softcap": 30.0}, "unfused"),
        ({"softcap": 30.0, "packed": True}, "unfused"),
        ({"window": 8, "dropout": 0.1}, "unfused"),
        # FP32 takes the kernel where it can, which TE does not offer it.
        ({"softmax": "learnable", "packed": True, "dtype": torch.float32}, "fused"),
        ({"window": 8, "dropout": 0.1, "dtype": torch.float32}, "fused"),
        ({"softcap": 30.0, "dtype": torch.float32}, "unfused"),
        # cuDNN's.
        ({"softmax": "learnable", "packed": True}, "unfused"),
        ({"softmax": "off-by-one", "packed": True}, "unfused"),
    ],
    ids=str,
)
def test_paths_in_training_are_those_of_an_h100(
    changes: dict[str, Any], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert path_of(Form(**{**BF16, **changes}), monkeypatch) == path


@pytest.mark.parametrize(
    ("softmax", "path"), [("vanilla", "fused"), ("learnable", "unfused"), ("off-by-one", "unfused")]
)
def test_determinism_has_no_fused_sinks(softmax: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    form = Form(**{**BF16, "softmax": softmax})
    assert path_of(form, monkeypatch) == path
    check(form)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("softcap", [0.0, 0.7], ids=["no cap", "cap"])
def test_fp32_is_the_same_on_either_path(packed: bool, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    form, sinks = Form((20, 20), 4, 2, 6, "learnable", softcap, packed=packed), torch.tensor([0.5, -1.0, 2.0, 0.0])
    results = []
    for fused in ("0", "1"):
        monkeypatch.setenv("NVTE_FUSED_ATTN", fused)
        dot_product_attention._attention_backends["backend_selection_requires_update"] = True
        module, leaves = form.module(sinks), [x.requires_grad_() for x in form.tensors()]
        out = form.run(module, leaves)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in leaves), module.softmax_offset.grad])
    for unfused, other in zip(*results, strict=True):
        torch.testing.assert_close(unfused, other, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 0.7], ids=["no cap", "cap"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_recomputed_attention_is_the_same(packed: bool, softcap: float, dtype: torch.dtype) -> None:
    check(
        Form((24, 24), window=7, softmax="learnable", softcap=softcap, packed=packed, dtype=dtype),
        checkpoint_core_attention=True,
    )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (None, torch.float32),
        ((1, 2, 1, 1), torch.bfloat16),
        ((2,), torch.float32),
        ((1, 3, 1, 1), torch.float32),
        ((1, 1, 1, 1), torch.float32),
    ],
)
def test_an_offset_whose_memory_means_something_else_is_refused(
    shape: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    offset = None if shape is None else torch.zeros(shape, dtype=dtype)
    x, lengths = torch.randn(4, 1, 2, SIZE), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"softmax_offset.*FP32 \[1, 2, 1, 1\]"):
        fused_attn.fused_attn_fwd(
            True,
            *(4, 4, lengths, lengths, x, x, x, x.dtype),
            fused_attn.FusedAttnBackend.F16_arbitrary_seqlen,
            qkv_layout="sbhd_sbhd_sbhd",
            attn_mask_type="causal",
            softmax_type="learnable",
            softmax_offset=offset,
        )
