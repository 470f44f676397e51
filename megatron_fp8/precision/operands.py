"""Names the tensors that a layer's GEMMs read, and finds their state and quantizers in Transformer Engine's modules.

A linear layer has three: `input`, `weight`, `grad_output`. A name is `layers.3/self_attention.layernorm_qkv/input`,
with the layer's global number; `LayerNormMLP` holds two linear layers, `layernorm_mlp.fc1` and `.fc2`. Where a layer is
itself a TE module, as a bare `te.Linear`, the name is `layers.3/input`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from transformer_engine.pytorch.distributed import in_fp8_activation_recompute_phase
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantized_tensor import Quantizer
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

from megatron_fp8.precision.te_recipe import linear_modules, num_gemms

Kind = Literal["input", "weight", "grad_output"]
# A module's slots are [input, weight, output] per linear layer in the forward and [grad_output, grad_input] in the
# backward pass; outputs and input gradients are not quantized, so their slots stay unused.
_FORWARD, _BACKWARD = "scaling_fwd", "scaling_bwd"
_SLOTS: tuple[tuple[Kind, str, int, int], ...] = (
    ("input", _FORWARD, 0, 3),
    ("weight", _FORWARD, 1, 3),
    ("grad_output", _BACKWARD, 0, 2),
)


@dataclass(frozen=True)
class Operand:
    """One tensor of one linear layer: its module, and its slot in TE's state of a direction."""

    layer: int
    linear: str
    kind: Kind
    module: TransformerEngineBaseModule
    gemm: int
    direction: str
    slot: int

    @property
    def name(self) -> str:
        """The tensor's name in the whole model."""
        return "/".join(part for part in (f"layers.{self.layer}", self.linear, self.kind) if part)

    @property
    def quantizers(self) -> Iterator[Quantizer]:
        """Its quantizers, those of overridden directions included; none before the layer first ran in FP8."""
        made = self.module.quantizers.get(self.direction)
        found = [made[self.slot]] if made else []
        if self.kind == "weight":
            # A cached quantized weight is updated by its own quantizer.
            cached = self.module._fp8_workspaces.get("weight" if self.weight_name is None else self.weight_name)
            found.append(getattr(cached, "_quantizer", None))
        for quantizer in found:
            if isinstance(quantizer, HybridQuantizer):
                yield from (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer)
            elif quantizer is not None:
                yield quantizer

    @property
    def is_recomputed(self) -> bool:
        """Whether this is the second forward pass of activation recomputation, which reads it again."""
        return self.kind != "grad_output" and in_fp8_activation_recompute_phase()

    @property
    def weight_name(self) -> str | None:
        """The module's attribute for the weight; None if it is several parameters."""
        names = getattr(self.module, "weight_names", None)
        if names is None:
            return f"fc{self.gemm + 1}_weight"
        return str(names[0]) if len(names) == 1 else None


def operands(layers: Mapping[int, nn.Module]) -> Iterator[Operand]:
    """Every operand of the linear layers in `layers`, by global number."""
    for number, layer in layers.items():
        for name, module in linear_modules(layer).items():
            count = num_gemms(module)
            for gemm in range(count):
                linear = f"{name}.fc{gemm + 1}".lstrip(".") if count > 1 else name
                for kind, direction, first, stride in _SLOTS:
                    yield Operand(number, linear, kind, module, gemm, direction, gemm * stride + first)


def by_quantizer(found: Iterable[Operand]) -> dict[int, Operand]:
    """The operands by the identities of their current quantizers."""
    return {id(quantizer): operand for operand in found for quantizer in operand.quantizers}


def layer_number(name: str) -> int:
    """The layer's global number in an operand's name."""
    return int(name.split("/", 1)[0].removeprefix("layers."))


def reduced(values: Mapping[str, Tensor], op: ReduceOp.RedOpType, group: ProcessGroup | None) -> dict[str, Any]:
    """Tensors of one shape as numbers or lists, by name in order, reduced over the ranks of `group`; one host copy."""
    if not values:
        return {}
    names = sorted(values)
    table = torch.stack([values[name] for name in names])
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(table, op=op, group=group)
    return dict(zip(names, table.tolist(), strict=True))
