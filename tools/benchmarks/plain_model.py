"""The plain-PyTorch model that ours is measured against: what a user would write, without Megatron or TE.

RMSNorm, RoPE, grouped-query attention through `F.scaled_dot_product_attention`, SwiGLU, untied head; QKV in one
matrix, gate and up projection in one matrix. It computes what `model/gpt.py` computes and can start from the same
weights. Must not import Transformer Engine or Megatron Core.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fp8.config.layout import fc1_rows, head_size, mlp_size, qkv_rows, query_groups
from megatron_fp8.config.schema import Config, ModelConfig
from megatron_fp8.model.init import InitSettings, initial_value

# Ours -> plain, with `layers.N.` before it for those of a block.
_BLOCK_NAMES = {
    "self_attention.layernorm_qkv.layer_norm_weight": "attention_norm.weight",
    "self_attention.layernorm_qkv.weight": "qkv.weight",
    "self_attention.proj.weight": "proj.weight",
    "layernorm_mlp.layer_norm_weight": "mlp_norm.weight",
    "layernorm_mlp.fc1_weight": "gate_up.weight",
    "layernorm_mlp.fc2_weight": "down.weight",
}
_OTHER_NAMES = {
    "embedding.word_embeddings.weight": "embedding.weight",
    "final_norm.weight": "final_norm.weight",
    "output_layer.weight": "head.weight",
}


class PlainBlock(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`, on `[b, s, h]`."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        hidden, self.head_size = model.hidden_size, head_size(model)
        self.num_heads, self.num_groups = model.num_attention_heads, query_groups(model)
        self.attention_norm = nn.RMSNorm(hidden, eps=model.norm_epsilon)
        self.qkv = nn.Linear(hidden, qkv_rows(model), bias=False)
        self.proj = nn.Linear(self.num_heads * self.head_size, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=model.norm_epsilon)
        self.gate_up = nn.Linear(hidden, fc1_rows(model), bias=False)
        self.down = nn.Linear(mlp_size(model), hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x`: `[b, s, h]`; `cos`, `sin`: `[s, head_size]`."""
        b, s, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(b, s, -1, self.head_size).transpose(1, 2)
        q, k, v = heads.split([self.num_heads, self.num_groups, self.num_groups], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.num_groups < self.num_heads)
        x = x + self.proj(context.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        output: Tensor = x + self.down(F.silu(gate) * up)
        return output


class PlainGPT(nn.Module):
    """The whole model; initial weights are those of ours for the same seed."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        model = config.model
        require_supported(model)
        assert model.vocab_size is not None
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(model) for _ in range(model.num_layers))
        self.final_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon)
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        size = head_size(model)
        frequencies = model.rotary_base ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(model.seq_length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._load_initial_values(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss in nats, FP32, over `tokens`, `labels` int64 `[b, s]`."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.cos, self.sin)
        logits = self.head(self.final_norm(hidden))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.reshape(-1))

    @torch.no_grad()
    def _load_initial_values(self, config: Config) -> None:
        model = config.model
        assert model.vocab_size is not None
        settings = InitSettings(
            config.training.seed, model.init_method_std, model.num_layers, model.vocab_size, model.activation
        )
        for ours, plain in _names(model.num_layers):
            parameter = self.get_parameter(plain)
            value = initial_value(ours, list(parameter.shape), settings)
            parameter.copy_(_queries_keys_values(value, model) if plain.endswith("qkv.weight") else value)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (RoFormer, section 3.4.2; halves, as in GPT-NeoX) of `[b, heads, s, d]`, in x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


def _names(num_layers: int) -> list[tuple[str, str]]:
    blocks = [
        (f"layers.{index}.{ours}", f"layers.{index}.{plain}")
        for index in range(num_layers)
        for ours, plain in _BLOCK_NAMES.items()
    ]
    return [*blocks, *_OTHER_NAMES.items()]


def _queries_keys_values(weight: Tensor, model: ModelConfig) -> Tensor:
    """Rows `[all q | all k | all v]` from TE's order, which is q.. k v for each query group."""
    groups, size = query_groups(model), head_size(model)
    per_group = model.num_attention_heads // groups
    by_group = weight.view(groups, per_group + 2, size, -1)
    parts = by_group.split([per_group, 1, 1], dim=1)
    return torch.cat([part.reshape(-1, weight.shape[1]) for part in parts])


def require_supported(model: ModelConfig) -> None:
    """Raise NotImplementedError for what this model, written for R1's family, does not have."""
    wanted: dict[str, object] = {
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    for name, value in wanted.items():
        if getattr(model, name) != value:
            raise NotImplementedError(f"the plain model has no model.{name}={getattr(model, name)}, only {value}")
    if model.vocab_size is None or model.vocab_size % model.make_vocab_size_divisible_by:
        raise NotImplementedError(
            f"the plain model pads no vocabulary: set model.vocab_size to a multiple of"
            f" {model.make_vocab_size_divisible_by} (model.make_vocab_size_divisible_by), not {model.vocab_size}"
        )
