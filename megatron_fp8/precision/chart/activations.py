"""Owns the chart's rows of what a block keeps for the backward pass, and of the logits. Imports no torch.

Bytes per token of a rank's layer. Attention is that of fused kernels (and of the stand-in): query, key, value, output
and one FP32 statistic per head and token are kept, scores are computed again. Dropout masks are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.precision.chart.rows import ELEMENT_BYTES, ChartRow, Formats

SECTION = "kept for backward"
PER = "token and layer"


def activation_rows(config: Config, layout: Layout, formats: Formats) -> Iterator[ChartRow]:
    """What a layer keeps that is not recomputed; with recompute, what a recomputed layer keeps comes first."""
    model, tp = config.model, layout.tensor_model_parallel_size
    shared = tp if config.parallel.sequence_parallel else 1
    hidden = model.hidden_size // shared
    params = formats.params
    size = ELEMENT_BYTES[params]
    if model.recompute_granularity == "full" and model.recompute_num_layers != 0:
        yield ChartRow(SECTION, "recomputed layer's input", params, float(hidden * size), PER)
        if model.recompute_num_layers is None or model.recompute_num_layers >= layout.layers_per_chunk:
            return
    heads = layout.attention_heads_per_rank
    attention = heads * layout.kv_channels
    qkv, ffn, fc1 = layout.qkv_rows // tp, layout.ffn_hidden_size_per_rank, layout.fc1_rows // tp
    per_norm = 2 if model.normalization == "LayerNorm" else 1
    yield ChartRow(SECTION, "inputs of the two norms", params, 2.0 * hidden * size, PER)
    yield ChartRow(SECTION, "statistics of the two norms", "fp32", 2 * per_norm * ELEMENT_BYTES["fp32"] / shared, PER)
    for tensor, features, divided_over, in_mlp in (
        ("qkv", model.hidden_size, shared, False),
        ("proj", attention, 1, False),
        ("fc1", model.hidden_size, shared, True),
        ("fc2", ffn, 1, True),
    ):
        yield from _kept_input(formats, tensor, features, divided_over, in_mlp)
    yield ChartRow(SECTION, "query, key, value", params, float(qkv * size), PER)
    yield ChartRow(SECTION, "attention's output", params, float(attention * size), PER)
    yield ChartRow(SECTION, "softmax statistics", "fp32", float(heads * ELEMENT_BYTES["fp32"]), PER)
    yield ChartRow(SECTION, "fc1's output, before the activation", params, float(fc1 * size), PER)


def _kept_input(formats: Formats, tensor: str, features: int, divided_over: int, in_mlp: bool) -> Iterator[ChartRow]:
    """wgrad reads columns; TE's LayerNormMLP keeps the rows too where they are bytes of their own."""
    rows, columns = formats.operand("fprop", "input"), formats.operand("wgrad", "input")
    if tensor == "proj" and columns == formats.params:
        return  # attention's output itself
    name = f"input of {tensor}"
    size = formats.row_of(columns, features, "columns") / divided_over
    yield ChartRow(SECTION, name, formats.scaled(columns), size, PER)
    fp8 = formats.fp8()
    in_blocks = fp8 is not None and fp8.recipe in ("blockwise", "mxfp8") and columns != formats.params
    if in_mlp and (rows != columns or in_blocks):
        size = formats.row_of(rows, features, "rows") / divided_over
        yield ChartRow(SECTION, f"{name}, rows", formats.scaled(rows), size, PER)


def logits_rows(layout: Layout, formats: Formats) -> Iterator[ChartRow]:
    """The head's output and what the cross entropy makes of it."""
    vocab = layout.padded_vocab_size_per_rank
    section, per = "logits", "token"
    yield ChartRow(section, "head's output", formats.params, float(vocab * ELEMENT_BYTES[formats.params]), per)
    yield ChartRow(section, "logits, then their softmax", "fp32", float(vocab * ELEMENT_BYTES["fp32"]), per)
