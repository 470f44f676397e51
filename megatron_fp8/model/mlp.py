"""The MLP of a block: Transformer Engine's, or two of its linear layers where that has no kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor, nn

from megatron_fp8.config.layer_kinds import mlp_has_bias, mlp_is_separate
from megatron_fp8.config.layout import GATED_ACTIVATIONS
from megatron_fp8.model.block_shape import BlockShape, zeros

# Activations that Transformer Engine has no kernels for, of the MLP's inner features or of (gate, up).
_SEPARATE_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": functools.partial(F.gelu, approximate="tanh"),
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "relu": F.relu,
    "reglu": lambda gate, up: F.relu(gate) * up,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "exact_gelu": F.gelu,
    "exact_geglu": lambda gate, up: F.gelu(gate) * up,
}


def make_mlp(shape: BlockShape, name: str, return_bias: bool) -> nn.Module:
    """The MLP of a block, with its norm; `return_bias`: the last bias is returned beside the output, not added."""
    model = shape.model
    if mlp_is_separate(model):
        return SeparateMLP(shape, name, return_bias)
    mlp: nn.Module = te.LayerNormMLP(
        model.hidden_size,
        shape.layout.ffn_hidden_size,
        bias=mlp_has_bias(model),
        return_bias=return_bias,
        activation=model.activation,
        output_layer_init_method=zeros,
        set_parallel_mode=True,
        name=name,
        **shape.norm,
        **shape.linear,
    )
    shape.finish_norm(mlp)
    return mlp


class SeparateMLP(nn.Module):
    """An MLP of two linear layers, with the activation between them in torch's kernels.

    For what `LayerNormMLP` cannot do: no norm before it, or an activation without a kernel.
    """

    def __init__(self, shape: BlockShape, name: str, return_bias: bool) -> None:
        super().__init__()
        model = shape.model
        self._is_gated = model.activation in GATED_ACTIVATIONS
        self._activation = _SEPARATE_ACTIVATIONS[model.activation]
        rows = shape.layout.ffn_hidden_size * (2 if self._is_gated else 1)
        first = {"bias": mlp_has_bias(model), "parallel_mode": "column", "name": f"{name}.fc1", **shape.linear}
        self.fc1: nn.Module
        if shape.has_pre_norms:
            self.fc1 = te.LayerNormLinear(model.hidden_size, rows, **first, **shape.norm)
            shape.finish_norm(self.fc1)
        else:
            self.fc1 = te.Linear(model.hidden_size, rows, **first)
        self.fc2 = te.Linear(
            shape.layout.ffn_hidden_size,
            model.hidden_size,
            bias=mlp_has_bias(model),
            return_bias=return_bias,
            parallel_mode="row",
            name=f"{name}.fc2",
            **shape.linear,
        )

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """`[s, b, h]` to the same, with the last bias apart as `LayerNormMLP` returns it."""
        inner = self.fc1(x, is_first_microbatch=is_first_microbatch)
        inner = self._activation(*inner.chunk(2, dim=-1)) if self._is_gated else self._activation(inner)
        output: Tensor | tuple[Tensor, Tensor] = self.fc2(inner, is_first_microbatch=is_first_microbatch)
        return output
