"""Defines a row of the precision chart in typed fields, and the formats and element sizes of a run. Imports no torch.

The planner, reports and tests read these fields; only `chart_labels` turns them into text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from megatron_fp8.config.layout import round_up
from megatron_fp8.precision.policy import Fp8Policy, PrecisionPolicy

Direction = Literal["rows", "columns"]
FP32_BYTES = 4
_MXFP8_BLOCK, _BLOCK = 32, 128


class Format(Enum):
    """Number format of an element."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    E4M3 = "e4m3"
    E5M2 = "e5m2"

    @property
    def is_fp8(self) -> bool:
        """Whether elements carry a scale beside them."""
        return self in (Format.E4M3, Format.E5M2)

    @property
    def bytes(self) -> int:
        """Bytes of an element."""
        return 4 if self is Format.FP32 else 1 if self.is_fp8 else 2


# Part of the chart.
Section = Enum("Section", "GEMM_OPERANDS COMMUNICATION PARAMETERS KEPT_FOR_BACKWARD LOGITS")
# Kind of tensor: GEMM operands, messages, per parameter, kept for backward, logits. NORM_GRADS, WEIGHT_AMAXES and
# TIED_EMBEDDING_GRADS are messages that only the planner counts.
Tensor = Enum(
    "Tensor",
    "GEMM_OPERAND OPERANDS_OUTSIDE_FP8 ATTENTION_OPERANDS HEAD_OPERANDS "
    "LINEAR_INPUT LINEAR_INPUT_FOR_WGRAD LINEAR_INPUT_GRAD LINEAR_OUTPUT LINEAR_OUTPUT_GRAD AMAXES "
    "EMBEDDING_OUTPUT HEAD_INPUT HEAD_INPUT_GRAD CROSS_ENTROPY_SUMS RESIDUAL_STREAM GRADS FP8_PARAMETERS "
    "OTHER_PARAMETERS ALL_PARAMETERS "
    "NORM_GRADS WEIGHT_AMAXES TIED_EMBEDDING_GRADS "
    "WEIGHTS FP8_LINEAR_WEIGHTS OTHER_WEIGHTS FP8_COPY FP8_TRANSPOSE MASTER_WEIGHTS WEIGHT_GRADS FIRST_MOMENT "
    "SECOND_MOMENT "
    "RECOMPUTED_LAYER_INPUT NORM_INPUTS NORM_STATISTICS QKV_INPUT PROJ_INPUT FC1_INPUT FC1_INPUT_ROWS FC2_INPUT "
    "FC2_INPUT_ROWS QUERY_KEY_VALUE ATTENTION_OUTPUT SOFTMAX_STATISTICS FC1_OUTPUT HEAD_OUTPUT LOGITS "
    "QUERY_KEY_NORMS OUTPUT_NORM_INPUTS ACTIVATED_GATE",
)
# The three GEMMs of a linear layer.
Gemm = Enum("Gemm", "FPROP DGRAD WGRAD")
# What a GEMM reads.
Operand = Enum("Operand", "INPUT WEIGHT GRAD")
# How ranks communicate.
Collective = Enum("Collective", "ALL_REDUCE ALL_REDUCE_MAX REDUCE_SCATTER ALL_GATHER SEND")
# Which ranks communicate. ENDS: the first and the last stage, which share a tied embedding.
Group = Enum("Group", {"TP": "TP", "PP": "PP", "DP": "DP", "TP_AND_DP": "TP x DP", "ENDS": "ends"})
# When ranks communicate. EACH_WAY: the bytes are those of one of the two passes; BOTH: of both together.
Phase = Enum("Phase", "FORWARD BACKWARD EACH_WAY BOTH")
# What a row's bytes are given per.
Per = Enum("Per", "ELEMENT PARAMETER TOKEN TOKEN_AND_LAYER TOKEN_AND_STAGE LAYER_AND_MICROBATCH LAYER_AND_STEP STEP")
# What shares a scale, and the scale's format.
Scales = Enum("Scales", "FP32_PER_TENSOR FP32_PER_BLOCK E8M0_PER_32")
# A remark on a row.
Note = Enum("Note", "WEIGHTS_THEMSELVES ONLY_IF_TRANSPOSED")


@dataclass(frozen=True)
class ChartRow:
    """One kind of tensor: `size` bytes `per` parameter, token, ... on one rank; of a collective, of the whole tensor.

    `gemm` and `operand` are those of `Tensor.GEMM_OPERAND`; `num_layers` of `Tensor.OPERANDS_OUTSIDE_FP8`.
    `num_shards`: data-parallel ranks that share the tensor.
    """

    section: Section
    tensor: Tensor
    format: Format
    size: float
    per: Per
    scales: Scales | None = None
    gemm: Gemm | None = None
    operand: Operand | None = None
    collective: Collective | None = None
    group: Group | None = None
    phase: Phase | None = None
    num_layers: int | None = None
    num_shards: int = 1
    note: Note | None = None


_SCALES = {
    "delayed": Scales.FP32_PER_TENSOR,
    "tensorwise": Scales.FP32_PER_TENSOR,
    "blockwise": Scales.FP32_PER_BLOCK,
    "mxfp8": Scales.E8M0_PER_32,
}
_PARAMS = {"float32": Format.FP32, "float16": Format.FP16, "bfloat16": Format.BF16}


@dataclass(frozen=True)
class Formats:
    """The formats of a run whose model has `num_layers` layers."""

    policy: PrecisionPolicy
    num_layers: int

    @property
    def params(self) -> Format:
        """Format of the residual stream and of parameters outside FP8."""
        return _PARAMS[self.policy.params_dtype]

    @property
    def num_fp8_layers(self) -> int:
        """Layers whose GEMMs run in FP8."""
        return 0 if self.policy.fp8 is None else self.num_layers - len(self.policy.fp8.bf16_layers)

    @property
    def fp8(self) -> Fp8Policy | None:
        """The FP8 policy, if any layer follows it."""
        return self.policy.fp8 if self.num_fp8_layers else None

    def operand(self, gemm: Gemm, operand: Operand) -> Format:
        """Format in which a GEMM of an FP8 layer (without FP8: of any layer) reads an operand."""
        fp8 = self.fp8
        if fp8 is None or getattr(fp8.override, gemm.name.lower()):
            return self.params
        return Format.E5M2 if operand is Operand.GRAD and fp8.fp8_format == "hybrid" else Format.E4M3

    def element_bytes(self, name: Format, operand: Operand) -> float:
        """Bytes of an element of a large operand, its share of the scales included."""
        fp8 = self.policy.fp8
        size = float(name.bytes)
        if not name.is_fp8 or fp8 is None:
            return size
        if fp8.recipe == "blockwise":
            return size + FP32_BYTES / (_BLOCK * _BLOCK if operand is Operand.WEIGHT else _BLOCK)
        # A delayed or tensorwise scale is one number a tensor.
        return size + (1 / _MXFP8_BLOCK if fp8.recipe == "mxfp8" else 0)

    def token_bytes(self, name: Format, features: int, direction: Direction) -> float:
        """Bytes of one token's `features` of an activation or gradient, its scales as TE pads them included."""
        fp8 = self.policy.fp8
        size = float(name.bytes * features)
        if not name.is_fp8 or fp8 is None:
            return size
        if fp8.recipe == "mxfp8":
            blocks = round_up(features // _MXFP8_BLOCK, 4)
            return size + (round_up(features, 128) / _MXFP8_BLOCK if direction == "columns" else blocks)
        if fp8.recipe == "blockwise":
            return size + FP32_BYTES * round_up(features, 4 if direction == "columns" else _BLOCK) / _BLOCK
        return size

    def scales(self, name: Format) -> Scales | None:
        """What the format's scales belong to."""
        return _SCALES[self.policy.fp8.recipe] if name.is_fp8 and self.policy.fp8 is not None else None
