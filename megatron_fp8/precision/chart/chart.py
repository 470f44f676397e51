"""Owns the precision chart: one row per kind of tensor of a run, with its format and what it costs.

Computed from the config and its layout alone; `tests/precision/test_chart.py` holds it against real tensors. Sizes
are those of one rank; of a collective, of the whole tensor that it moves. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.precision.chart.activations import activation_rows, logits_rows
from megatron_fp8.precision.chart.collectives import collective_rows
from megatron_fp8.precision.chart.gemms import gemm_rows
from megatron_fp8.precision.chart.rows import ChartRow, Formats
from megatron_fp8.precision.chart.weights import weight_rows
from megatron_fp8.precision.policy import build_policy


def precision_chart(config: Config, layout: Layout) -> list[ChartRow]:
    """Every row, in the order in which a person reads them."""
    num_layers = config.model.num_layers
    formats = Formats(build_policy(config.precision, num_layers), num_layers)
    return [
        *gemm_rows(formats),
        *collective_rows(config, layout, formats),
        *weight_rows(config, layout, formats),
        *activation_rows(config, layout, formats),
        *logits_rows(layout, formats),
    ]


def format_chart(rows: Sequence[ChartRow]) -> str:
    """The chart as text, a line a row under each section's name."""
    tensors = max(len(row.tensor) for row in rows)
    sizes = max(len(format_size(row)) for row in rows)
    lines: list[str] = []
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines.append(section)
        lines.append(f"  {row.tensor:<{tensors}}  {format_size(row):>{sizes}} B per {row.per}, {row.format}")
    return "\n".join(lines)


def format_size(row: ChartRow) -> str:
    """Bytes with as many digits as tell something: 2, 1.03125, 4,096."""
    return f"{row.size:,.0f}" if row.size == int(row.size) else f"{row.size:,.5g}"
