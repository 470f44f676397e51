"""Owns what a row of the precision chart is, and the formats and element sizes that rows are made of. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_fp8.precision.policy import Fp8Policy, PrecisionPolicy

Operand = Literal["input", "weight", "grad"]
Direction = Literal["rows", "columns"]

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "e4m3": 1, "e5m2": 1}
PARAMS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# The two operands of each GEMM, and the direction in which it reads them.
GEMMS: dict[str, tuple[tuple[Operand, Direction], tuple[Operand, Direction]]] = {
    "fprop": (("input", "rows"), ("weight", "rows")),
    "dgrad": (("grad", "rows"), ("weight", "columns")),
    "wgrad": (("grad", "columns"), ("input", "columns")),
}
_MXFP8_BLOCK, _BLOCK, _FP32 = 32, 128, 4


@dataclass(frozen=True)
class ChartRow:
    """One kind of tensor: `size` bytes `per` parameter, token, ... on one rank."""

    section: str
    tensor: str
    format: str
    size: float
    per: str


@dataclass(frozen=True)
class Formats:
    """The formats of a run whose model has `num_layers` layers."""

    policy: PrecisionPolicy
    num_layers: int

    @property
    def params(self) -> str:
        """Format of the residual stream, and of parameters that are not in FP8."""
        return PARAMS[self.policy.params_dtype]

    @property
    def num_fp8_layers(self) -> int:
        """Layers whose GEMMs run in FP8."""
        return 0 if self.policy.fp8 is None else self.num_layers - len(self.policy.fp8.bf16_layers)

    def fp8(self) -> Fp8Policy | None:
        """The FP8 policy, if any layer follows it."""
        return self.policy.fp8 if self.num_fp8_layers else None

    def operand(self, gemm: str, operand: Operand) -> str:
        """Format in which a GEMM of an FP8 layer (without FP8: of any layer) reads an operand."""
        fp8 = self.fp8()
        if fp8 is None or getattr(fp8.override, gemm):
            return self.params
        return "e5m2" if operand == "grad" and fp8.fp8_format == "hybrid" else "e4m3"

    def element(self, format_name: str, operand: Operand) -> float:
        """Bytes of an element of a large operand, its share of the scales included."""
        fp8 = self.policy.fp8
        size = float(ELEMENT_BYTES[format_name])
        if format_name not in ("e4m3", "e5m2") or fp8 is None:
            return size
        if fp8.recipe == "blockwise":
            return size + _FP32 / (_BLOCK * _BLOCK if operand == "weight" else _BLOCK)
        # A delayed or tensorwise scale is one number a tensor.
        return size + (1 / _MXFP8_BLOCK if fp8.recipe == "mxfp8" else 0)

    def row_of(self, format_name: str, features: int, direction: Direction) -> float:
        """Bytes of one token's `features` of an activation or gradient, its scales as TE pads them included."""
        fp8 = self.policy.fp8
        size = float(ELEMENT_BYTES[format_name] * features)
        if format_name not in ("e4m3", "e5m2") or fp8 is None:
            return size
        if fp8.recipe == "mxfp8":
            padded = _up(features, 128) if direction == "columns" else _up(features // _MXFP8_BLOCK, 4) * _MXFP8_BLOCK
            return size + padded / _MXFP8_BLOCK
        if fp8.recipe == "blockwise":
            padded = _up(features, 4) if direction == "columns" else _up(features, _BLOCK)
            return size + _FP32 * padded / _BLOCK
        return size

    def scaled(self, format_name: str) -> str:
        """A format and what its scales belong to."""
        fp8 = self.policy.fp8
        if format_name not in ("e4m3", "e5m2") or fp8 is None:
            return format_name
        scales = {
            "delayed": "fp32 scale per tensor",
            "tensorwise": "fp32 scale per tensor",
            "blockwise": "fp32 scale per block of 128",
            "mxfp8": "e8m0 scale per 32",
        }
        return f"{format_name}, {scales[fp8.recipe]}"


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
