"""Owns the names of the tensors that a layer's GEMMs read, and where Transformer Engine keeps what belongs to them.

A linear layer has three: `input`, `weight`, `grad_output`. A name is `layers.3/self_attention.layernorm_qkv/input`,
with the layer's number in the whole model; `LayerNormMLP` holds two linear layers, `layernorm_mlp.fc1` and `.fc2`.
Must not know number formats or what is measured.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformer_engine.pytorch.distributed import in_fp8_activation_recompute_phase
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantized_tensor import Quantizer
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

from megatron_fp8.precision.te_modules import linear_modules, num_gemms

Kind = Literal["input", "weight", "grad_output"]
# A module's slots are [input, weight, output] for each linear layer in the forward and [grad_output, grad_input] in
# the backward pass; outputs and input gradients are not quantized, so their slots stay unused.
_FORWARD, _BACKWARD = "scaling_fwd", "scaling_bwd"
_SLOTS: tuple[tuple[Kind, str, int, int], ...] = (
    ("input", _FORWARD, 0, 3),
    ("weight", _FORWARD, 1, 3),
    ("grad_output", _BACKWARD, 0, 2),
)


@dataclass(frozen=True)
class Operand:
    """One tensor of one linear layer: which module holds it, and its slot in TE's state of a direction."""

    layer: int
    linear: str
    kind: Kind
    module: TransformerEngineBaseModule
    gemm: int
    direction: str
    slot: int

    @property
    def name(self) -> str:
        """The whole model's name of the tensor."""
        return f"layers.{self.layer}/{self.linear}/{self.kind}"

    @property
    def quantizers(self) -> Iterator[Quantizer]:
        """What quantizes it, directions that are overridden among them; empty before the layer first ran in FP8."""
        made = self.module.quantizers.get(self.direction)
        found = [made[self.slot]] if made else []
        if self.kind == "weight":
            # A cached quantized weight is quantized anew by a quantizer of its own.
            cached = self.module._fp8_workspaces.get("weight" if self.weight_name is None else self.weight_name)
            found.append(getattr(cached, "_quantizer", None))
        for quantizer in found:
            if isinstance(quantizer, HybridQuantizer):
                yield from (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer)
            elif quantizer is not None:
                yield quantizer

    @property
    def is_recomputed(self) -> bool:
        """Whether it is read a second time now, by a forward pass that makes activations again."""
        return self.kind != "grad_output" and in_fp8_activation_recompute_phase()

    @property
    def weight_name(self) -> str | None:
        """The attribute that holds the linear layer's weight; None where it is several parameters."""
        names = getattr(self.module, "weight_names", None)
        if names is None:
            return f"fc{self.gemm + 1}_weight"
        return str(names[0]) if len(names) == 1 else None


def operands(layers: Mapping[int, nn.Module]) -> Iterator[Operand]:
    """Every tensor of the layers' linear layers, by the layers' numbers in the whole model."""
    for number, layer in layers.items():
        for name, module in linear_modules(layer).items():
            count = num_gemms(module)
            for gemm in range(count):
                linear = f"{name}.fc{gemm + 1}" if count > 1 else name
                for kind, direction, first, stride in _SLOTS:
                    yield Operand(number, linear, kind, module, gemm, direction, gemm * stride + first)


def by_quantizer(found: Iterable[Operand]) -> dict[int, Operand]:
    """The operands by the identities of what quantizes them at present."""
    return {id(quantizer): operand for operand in found for quantizer in operand.quantizers}


def layer_number(name: str) -> int:
    """The layer's number in a tensor's name."""
    return int(name.split("/", 1)[0].removeprefix("layers."))
