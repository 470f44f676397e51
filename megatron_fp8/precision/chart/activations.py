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
    hidden = model.hidden_size // (tp if config.parallel.sequence_parallel else 1)
    params = formats.params
    size = ELEMENT_BYTES[params]
    if model.recompute_granularity == "full":
        yield ChartRow(SECTION, "recomputed layer's input", params, float(hidden * size), PER)
        if model.recompute_num_layers is None or model.recompute_num_layers >= layout.layers_per_chunk:
            return
    heads = layout.attention_heads_per_rank
    attention = heads * layout.kv_channels
    qkv, ffn, fc1 = layout.qkv_rows // tp, layout.ffn_hidden_size_per_rank, layout.fc1_rows // tp
    per_norm = 2 if model.normalization == "LayerNorm" else 1
    shared = layout.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    yield ChartRow(SECTION, "inputs of the two norms", params, 2.0 * hidden * size, PER)
    yield ChartRow(SECTION, "statistics of the two norms", "fp32", 2 * per_norm * ELEMENT_BYTES["fp32"] / shared, PER)
    kept = formats.operand("wgrad", "input")
    for tensor, features, in_mlp in (
        ("qkv", hidden, False),
        ("proj", attention, False),
        ("fc1", hidden, True),
        ("fc2", ffn, True),
    ):
        if tensor == "proj" and kept == params:
            continue  # attention's output itself
        directions, total = _kept_input(formats, kept, features, in_mlp)
        yield ChartRow(SECTION, f"input of {tensor}", formats.scaled(kept) + directions, total, PER)
    yield ChartRow(SECTION, "query, key, value", params, float(qkv * size), PER)
    yield ChartRow(SECTION, "attention's output", params, float(attention * size), PER)
    yield ChartRow(SECTION, "softmax statistics", "fp32", float(heads * ELEMENT_BYTES["fp32"]), PER)
    yield ChartRow(SECTION, "fc1's output, before the activation", params, float(fc1 * size), PER)


def _kept_input(formats: Formats, kept: str, features: int, in_mlp: bool) -> tuple[str, float]:
    """(what is kept, bytes per token): wgrad reads columns; TE's LayerNormMLP keeps the rows of blocks with them."""
    fp8 = formats.policy.fp8
    size = formats.row_of(kept, features, "columns")
    if in_mlp and kept != formats.params and fp8 is not None and fp8.recipe in ("blockwise", "mxfp8"):
        return "; rows and columns", size + formats.row_of(kept, features, "rows")
    return "", size


def logits_rows(layout: Layout, formats: Formats) -> Iterator[ChartRow]:
    """The head's output and what the cross entropy makes of it."""
    vocab = layout.padded_vocab_size_per_rank
    section, per = "logits", "token"
    yield ChartRow(section, "head's output", formats.params, float(vocab * ELEMENT_BYTES[formats.params]), per)
    yield ChartRow(section, "logits, then their softmax", "fp32", float(vocab * ELEMENT_BYTES["fp32"]), per)
