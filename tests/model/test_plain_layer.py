"""A block of ours is the block of the papers: TE's `TransformerLayer` against the same in plain torch operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.pytorch.attention import RotaryPositionEmbedding

SEQ, BATCH, HIDDEN, HEADS, FFN = 48, 2, 64, 4, 96
VARIANTS = {
    "llama": {"normalization": "RMSNorm", "activation": "swiglu", "num_gqa_groups": 2, "bias": False},
    "gpt2": {"normalization": "LayerNorm", "activation": "gelu", "num_gqa_groups": 4, "bias": True},
    "squared-relu": {"normalization": "LayerNorm", "activation": "srelu", "num_gqa_groups": 1, "bias": False},
}
# FP32: order of sums. BF16: a few roundings (2^-8 each) on the way, relative to the norm of the whole.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def plain_norm(x: Tensor, weight: dict[str, Tensor], prefix: str) -> Tensor:
    scale, shift = weight[prefix + ".layer_norm_weight"], weight.get(prefix + ".layer_norm_bias")
    if shift is None:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * scale
    return F.layer_norm(x, (HIDDEN,), scale, shift, 1e-5)


def plain_rope(x: Tensor) -> Tensor:
    """`[s, b, h, d]`; halves rotated against each other, base 10000 (Su et al. 2021, as in GPT-NeoX)."""
    d = x.shape[-1]
    frequencies = 10000.0 ** (-torch.arange(0, d, 2, dtype=x.dtype, device=x.device) / d)
    angles = (torch.arange(x.shape[0], dtype=x.dtype, device=x.device).unsqueeze(1) * frequencies).view(
        -1, 1, 1, d // 2
    )
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def plain_attention(x: Tensor, weight: dict[str, Tensor], groups: int, rope: bool) -> Tensor:
    head = HIDDEN // HEADS
    qkv = F.linear(x, weight["self_attention.layernorm_qkv.weight"], weight.get("self_attention.layernorm_qkv.bias"))
    # Rows by group: the group's query heads, its key, its value.
    qkv = qkv.view(SEQ, BATCH, groups, HEADS // groups + 2, head)
    query = qkv[:, :, :, :-2].reshape(SEQ, BATCH, HEADS, head)
    key, value = (qkv[:, :, :, i].repeat_interleave(HEADS // groups, dim=2) for i in (-2, -1))
    if rope:
        query, key = plain_rope(query), plain_rope(key)
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / head**0.5
    scores = scores.masked_fill(torch.ones(SEQ, SEQ, device=x.device).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), value).reshape(SEQ, BATCH, HIDDEN)
    return F.linear(mixed, weight["self_attention.proj.weight"], weight.get("self_attention.proj.bias"))


def plain_mlp(x: Tensor, weight: dict[str, Tensor], activation: str) -> Tensor:
    inner = F.linear(x, weight["layernorm_mlp.fc1_weight"], weight.get("layernorm_mlp.fc1_bias"))
    if activation == "swiglu":
        gate, up = inner.chunk(2, dim=-1)
        inner = F.silu(gate) * up
    elif activation == "gelu":
        inner = F.gelu(inner, approximate="tanh")
    else:
        inner = F.relu(inner).square()
    return F.linear(inner, weight["layernorm_mlp.fc2_weight"], weight.get("layernorm_mlp.fc2_bias"))


def plain_layer(x: Tensor, weight: dict[str, Tensor], variant: dict, rope: bool) -> Tensor:
    normed = plain_norm(x, weight, "self_attention.layernorm_qkv")
    x = x + plain_attention(normed, weight, variant["num_gqa_groups"], rope)
    return x + plain_mlp(plain_norm(x, weight, "layernorm_mlp"), weight, variant["activation"])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_layer_equals_plain_torch(name: str, rope: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = te.TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, params_dtype=dtype,
        self_attn_mask_type="causal", attn_input_format="sbhd", device="cuda", **VARIANTS[name],
    )  # fmt: skip
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(SEQ, BATCH, HIDDEN, dtype=dtype, device="cuda", requires_grad=True)
    angles = RotaryPositionEmbedding(HIDDEN // HEADS)(SEQ) if rope else None
    grad = torch.randn(SEQ, BATCH, HIDDEN, dtype=dtype, device="cuda")
    output = layer(x, rotary_pos_emb=angles)
    output.backward(grad)

    exact = {key: value.detach().double().requires_grad_() for key, value in layer.named_parameters()}
    exact_x = x.detach().double().requires_grad_()
    expected = plain_layer(exact_x, exact, VARIANTS[name], rope)
    expected.backward(grad.double())

    found = {"output": (output, expected), "input gradient": (x.grad, exact_x.grad)}
    found |= {key: (value.grad, exact[key].grad) for key, value in layer.named_parameters()}
    for what, (ours, reference) in found.items():
        error = float((ours.detach().double() - reference.detach()).norm() / reference.detach().norm())
        assert error < TOLERANCES[dtype], f"{what}: relative error {error:.1e}"
