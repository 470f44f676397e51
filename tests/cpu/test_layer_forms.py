"""TE's whole TransformerLayer in every form that it has, recomputed or not, against the same layer in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

te = pytest.importorskip("transformer_engine.pytorch")
from transformer_engine.pytorch.attention import RotaryPositionEmbedding  # noqa: E402

HEADS, GROUPS, SIZE, FFN = 4, 2, 8, 48
HIDDEN, EPSILON = HEADS * SIZE, 1e-5
Tensor = torch.Tensor


def gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "qgelu": lambda x: x * (1.702 * x).sigmoid(),
    "relu": functional.relu,
    "srelu": lambda x: functional.relu(x) ** 2,
    "silu": functional.silu,
}
GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "geglu": lambda gate, x: gelu(gate) * x,
    "glu": lambda gate, x: gate.sigmoid() * x,
    "qgeglu": lambda gate, x: PLAIN["qgelu"](gate) * x,
    "reglu": lambda gate, x: functional.relu(gate) * x,
    "sreglu": lambda gate, x: functional.relu(gate) ** 2 * x,
    "swiglu": lambda gate, x: functional.silu(gate) * x,
    "clamped_swiglu": lambda gate, x: PLAIN["qgelu"](gate.clamp(max=7.0)) * (x.clamp(-7.0, 7.0) + 1),
}


@dataclass(frozen=True)
class Form:
    """Arguments of the layer, and how it is called."""

    activation: str = "swiglu"
    normalization: str = "RMSNorm"
    zero_centered_gamma: bool = False
    qk_norm_type: str | None = None
    qk_norm_before_rope: bool = False
    rotary_percent: float = 1.0
    rotary_pos_interleaved: bool = False
    parallel_attention_mlp: bool = False
    bias: bool = False
    window: int | None = None
    softmax_type: str = "vanilla"
    softcap: float = 0.0
    packed: bool = False
    recompute: bool = False

    def layer(self) -> Any:
        torch.cuda.manual_seed(3)
        names = ("activation", "normalization", "zero_centered_gamma", "qk_norm_type", "qk_norm_before_rope")
        more = ("rotary_pos_interleaved", "parallel_attention_mlp", "bias", "softmax_type", "softcap")
        layer = te.TransformerLayer(
            HIDDEN,
            FFN,
            HEADS,
            num_gqa_groups=GROUPS,
            layernorm_epsilon=EPSILON,
            qk_norm_eps=EPSILON,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            window_size=None if self.window is None else (self.window - 1, 0),
            self_attn_mask_type="padding_causal" if self.packed else "causal",
            attn_input_format="thd" if self.packed else "sbhd",
            params_dtype=torch.float32,
            **{name: getattr(self, name) for name in (*names, *more)},
        )
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, device="cuda"))
        return layer


class Reference:
    """The layer written out, in float64, on copies of its parameters."""

    def __init__(self, form: Form, layer: Any, angles: Tensor) -> None:
        self.form, self.angles = form, angles.double()
        self.parameters = {
            name: parameter.detach().double().requires_grad_() for name, parameter in layer.named_parameters()
        }

    def __call__(self, x: Tensor) -> Tensor:
        """x: one sequence `[s, hidden]`."""
        mixed = self.attention(x)
        if self.form.parallel_attention_mlp:
            return x + mixed + self.mlp(x)
        return x + mixed + self.mlp(x + mixed)

    def norm(self, x: Tensor, kind: str, prefix: str, centered: bool) -> Tensor:
        if kind == "L2Normalization":
            return x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt()
        weight = self.parameters[f"{prefix}weight"] + (1 if centered else 0)
        if kind == "LayerNorm":
            return functional.layer_norm(x, x.shape[-1:], weight, self.parameters[f"{prefix}bias"], EPSILON)
        return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight

    def linear(self, x: Tensor, prefix: str) -> Tensor:
        return functional.linear(x, self.parameters[f"{prefix}weight"], self.parameters.get(f"{prefix}bias"))

    def mlp(self, x: Tensor) -> Tensor:
        form = self.form
        hidden = self.norm(x, form.normalization, "layernorm_mlp.layer_norm_", form.zero_centered_gamma)
        hidden = self.linear(hidden, "layernorm_mlp.fc1_")
        if form.activation in GATED:
            hidden = GATED[form.activation](*hidden.chunk(2, dim=-1))
        else:
            hidden = PLAIN[form.activation](hidden)
        return self.linear(hidden, "layernorm_mlp.fc2_")

    def rotated(self, x: Tensor) -> Tensor:
        """x: `[s, h, d]`."""
        angles = self.angles[: len(x)]
        turned, kept = x.split([angles.shape[-1], x.shape[-1] - angles.shape[-1]], dim=-1)
        if self.form.rotary_pos_interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
            partner = torch.stack((-second, first), dim=-1).flatten(-2)
        else:
            first, second = turned.chunk(2, dim=-1)
            partner = torch.cat((-second, first), dim=-1)
        return torch.cat((turned * angles.cos() + partner * angles.sin(), kept), dim=-1)

    def attention(self, x: Tensor) -> Tensor:
        form, own = self.form, "self_attention."
        hidden = self.norm(x, form.normalization, f"{own}layernorm_qkv.layer_norm_", form.zero_centered_gamma)
        q, k, v = (
            self.linear(hidden, f"{own}layernorm_qkv.{name}_").unflatten(-1, (-1, SIZE))
            for name in ("query", "key", "value")
        )
        for step in ("norm", "turn") if form.qk_norm_before_rope else ("turn", "norm"):
            if step == "turn":
                q, k = self.rotated(q), self.rotated(k)
            elif form.qk_norm_type is not None:
                q = self.norm(q, form.qk_norm_type, f"{own}q_norm.", False)
                k = self.norm(k, form.qk_norm_type, f"{own}k_norm.", False)
        k, v = (part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(SIZE)
        if form.softcap:
            scores = form.softcap * torch.tanh(scores / form.softcap)
        back = torch.arange(len(x))[:, None] - torch.arange(len(x))[None, :]
        scores = scores.masked_fill((back < 0) | (back >= (form.window or len(x))), -math.inf)
        if form.softmax_type != "vanilla":
            name = f"{own}core_attention.softmax_offset"
            sinks = self.parameters.get(name, torch.zeros(HEADS, dtype=torch.float64))
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, len(x), 1)), dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., : len(x)], v)
        return self.linear(mixed.flatten(-2), f"{own}proj.")


def check(form: Form, lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    layer = form.layer()
    longest = max(lengths)
    table = RotaryPositionEmbedding(SIZE, form.rotary_percent, interleaved=form.rotary_pos_interleaved)(longest)
    reference = Reference(form, layer, table[:, 0])
    layer.to(dtype)
    x = torch.randn(sum(lengths), HIDDEN, generator=torch.Generator("cuda").manual_seed(1))
    exact = x.double().requires_grad_()
    right = torch.cat([reference(part) for part in exact.split(lengths)])
    weights = torch.randn(right.shape, generator=torch.Generator("cuda").manual_seed(2)).double()
    (right * weights).sum().backward()

    x = x.to(dtype).requires_grad_()
    call: dict[str, Any] = {"rotary_pos_emb": table}
    if form.packed:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        call |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ends)
        call |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest)
        given = x
    else:
        given = x.view(len(lengths), longest, HIDDEN).transpose(0, 1).contiguous()
    out = te.checkpoint(layer, given, **call) if form.recompute else layer(given, **call)
    out = out if form.packed else out.transpose(0, 1).reshape(-1, HIDDEN)
    (out * weights).sum().backward()

    found = {name: (parameter.grad, reference.parameters[name].grad) for name, parameter in layer.named_parameters()}
    for name, (got, wanted) in {"out": (out, right), "x": (x.grad, exact.grad), **found}.items():
        assert got is not None, name
        assert wanted is not None, name
        # Of a shift of all keys, which a softmax does not see, nothing but rounding is left.
        error = (got.double() - wanted).norm() / wanted.norm().clamp(min=1.0)
        assert error < (2e-4 if dtype == torch.float32 else 0.08), f"{name}: {error}"


@st.composite
def forms(draw: st.DrawFn) -> Form:
    return Form(
        draw(st.sampled_from([*PLAIN, *GATED])),
        draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        draw(st.booleans()),
        draw(st.sampled_from([None, "LayerNorm", "RMSNorm", "L2Normalization"])),
        draw(st.booleans()),
        draw(st.sampled_from([0.5, 1.0])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([None, 1, 5])),
        draw(st.sampled_from(["vanilla", "learnable", "off-by-one"])),
        draw(st.sampled_from([0.0, 0.0, 2.0])),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(form=forms(), lengths=st.lists(st.integers(2, 24), min_size=1, max_size=3))
def test_every_form_of_a_layer_is_the_reference(form: Form, lengths: list[int]) -> None:
    check(form, tuple(lengths) if form.packed else (lengths[0],) * len(lengths))


@pytest.mark.parametrize("activation", [*PLAIN, *GATED])
def test_every_activation_of_a_layer(activation: str) -> None:
    check(Form(activation, bias=True), (16, 16))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(form=forms())
def test_a_layer_in_bf16_is_near_the_reference(form: Form) -> None:
    check(form, (16, 16), torch.bfloat16)
