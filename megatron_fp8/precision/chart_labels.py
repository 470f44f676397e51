"""Words the precision chart: the one place where its typed rows become text. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from megatron_fp8.precision.chart_rows import (
    ChartRow,
    Collective,
    Format,
    Gemm,
    Group,
    Note,
    Operand,
    Per,
    Phase,
    Scales,
    Section,
    Tensor,
)

_ENUMS: tuple[type[Enum], ...] = (Section, Tensor, Gemm, Operand, Collective, Group, Phase, Per, Format, Scales, Note)
# Every word of the chart. Most are the names themselves.
LABELS: dict[Enum, str] = {member: member.name.lower().replace("_", " ") for kind in _ENUMS for member in kind}
LABELS |= {member: member.value for member in Group}
LABELS |= {
    Section.GEMM_OPERANDS: "GEMM operands",
    Tensor.OPERANDS_OUTSIDE_FP8: "layers outside FP8",
    Tensor.ATTENTION_OPERANDS: "attention's query, key, value",
    Tensor.HEAD_OPERANDS: "head's operands",
    Tensor.LINEAR_INPUT: "inputs",
    Tensor.LINEAR_INPUT_FOR_WGRAD: "inputs for wgrad",
    Tensor.LINEAR_INPUT_GRAD: "input gradients",
    Tensor.LINEAR_OUTPUT: "outputs",
    Tensor.LINEAR_OUTPUT_GRAD: "output gradients",
    Tensor.EMBEDDING_OUTPUT: "embeddings",
    Tensor.HEAD_INPUT: "the head's input",
    Tensor.HEAD_INPUT_GRAD: "the head's input gradient",
    Tensor.CROSS_ENTROPY_SUMS: "cross-entropy sums",
    Tensor.RESIDUAL_STREAM: "the residual stream",
    Tensor.GRADS: "gradients",
    Tensor.FP8_PARAMETERS: "FP8 layers' weights",
    Tensor.ALL_PARAMETERS: "parameters",
    Tensor.NORM_GRADS: "norms' gradients",
    Tensor.WEIGHT_AMAXES: "FP8 weights' amaxes",
    Tensor.TIED_EMBEDDING_GRADS: "the tied embedding's gradients",
    Tensor.FP8_LINEAR_WEIGHTS: "weights of FP8 linear layers",
    Tensor.FP8_COPY: "their FP8 copy, rows (fprop)",
    Tensor.FP8_TRANSPOSE: "their FP8 copy, columns (dgrad)",
    Tensor.WEIGHT_GRADS: "weight gradients",
    Tensor.FIRST_MOMENT: "optimizer's first moment",
    Tensor.SECOND_MOMENT: "optimizer's second moment",
    Tensor.RECOMPUTED_LAYER_INPUT: "recomputed layer's input",
    Tensor.NORM_INPUTS: "inputs of the norms before attention and MLP",
    Tensor.QUERY_KEY_NORMS: "queries and keys, before their norm",
    Tensor.OUTPUT_NORM_INPUTS: "outputs of attention and MLP, before their norm",
    Tensor.ACTIVATED_GATE: "the gate, after the activation",
    Tensor.NORM_STATISTICS: "statistics of the two norms",
    Tensor.QKV_INPUT: "input of qkv",
    Tensor.PROJ_INPUT: "input of proj",
    Tensor.FC1_INPUT: "input of fc1",
    Tensor.FC1_INPUT_ROWS: "input of fc1, rows",
    Tensor.FC2_INPUT: "input of fc2",
    Tensor.FC2_INPUT_ROWS: "input of fc2, rows",
    Tensor.QUERY_KEY_VALUE: "query, key, value",
    Tensor.ATTENTION_OUTPUT: "attention's output",
    Tensor.FC1_OUTPUT: "fc1's output, before the activation",
    Tensor.HEAD_OUTPUT: "head's output",
    Tensor.LOGITS: "logits, then their softmax",
    Collective.ALL_REDUCE: "all-reduce",
    Collective.ALL_REDUCE_MAX: "all-reduce (max)",
    Collective.REDUCE_SCATTER: "reduce-scatter",
    Collective.ALL_GATHER: "all-gather",
    Collective.SEND: "send and receive",
    Group.ENDS: "first and last stage's",
    Phase.BOTH: "both ways",
    Per.LAYER_AND_MICROBATCH: "layer and micro-batch",
    Scales.FP32_PER_TENSOR: "fp32 scale per tensor",
    Scales.FP32_PER_BLOCK: "fp32 scale per block of 128",
    Scales.E8M0_PER_32: "e8m0 scale per 32",
    Note.WEIGHTS_THEMSELVES: "the weights themselves",
    Note.ONLY_IF_TRANSPOSED: "not kept where GEMMs read any layout (Blackwell, CPU stand-in)",
}


def row_label(row: ChartRow) -> str:
    """What the row is about: `fprop input`, `TP all-gather, forward: inputs`, `DP all-gather of parameters`."""
    label = LABELS[row.tensor]
    if row.gemm is not None and row.operand is not None:
        return f"{LABELS[row.gemm]} {LABELS[row.operand]}"
    if row.group is not None and row.collective is not None:
        head = f"{LABELS[row.group]} {LABELS[row.collective]}"
        return f"{head} of {label}" if row.phase is None else f"{head}, {LABELS[row.phase]}: {label}"
    return label if row.num_layers is None else f"{row.num_layers} {label}"


def row_format(row: ChartRow) -> str:
    """The row's number format, what shares a scale, and notes."""
    parts = [LABELS[member] for member in (row.format, row.scales, row.note) if member is not None]
    parts += [f"sharded over {row.num_shards} ranks"] if row.num_shards > 1 else []
    return ", ".join(parts)


def row_size(row: ChartRow) -> str:
    """Bytes with no more digits than they need: 2, 1.0312, 4,096."""
    return f"{row.size:,.0f}" if row.size == int(row.size) else f"{row.size:,.5g}"


def format_chart(rows: Sequence[ChartRow]) -> str:
    """The chart as text, a line for each row under its section's name."""
    labels = max(len(row_label(row)) for row in rows)
    sizes = max(len(row_size(row)) for row in rows)
    lines: list[str] = []
    section = None
    for row in rows:
        if row.section is not section:
            section = row.section
            lines.append(LABELS[section])
        size = f"{row_size(row):>{sizes}} B per {LABELS[row.per]}"
        lines.append(f"  {row_label(row):<{labels}}  {size}, {row_format(row)}")
    return "\n".join(lines)


def chart_records(rows: Sequence[ChartRow]) -> list[dict[str, str | int | float]]:
    """The rows as JSON values: their typed fields by name (those that are set), and how a page words them.

    `section_label`, `label`, `format_label` and `per_label` are for display alone.
    """
    return [_record(row) for row in rows]


def _record(row: ChartRow) -> dict[str, str | int | float]:
    record: dict[str, str | int | float] = {}
    for name, value in vars(row).items():
        if value is not None:
            record[name] = value.name.lower() if isinstance(value, Enum) else value
    return {
        **record,
        "section_label": LABELS[row.section],
        "label": row_label(row),
        "format_label": row_format(row),
        "per_label": LABELS[row.per],
    }
