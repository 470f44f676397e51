"""Owns the chart's rows of what GEMMs multiply. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.precision.chart.rows import GEMMS, ChartRow, Formats

SECTION = "GEMM operands"


def gemm_rows(formats: Formats) -> Iterator[ChartRow]:
    """Operands of a block's linear layers, of those kept out of FP8, of attention, and of the head."""
    params = formats.params
    for gemm, operands in GEMMS.items():
        for operand, _ in operands:
            name = formats.operand(gemm, operand)
            yield ChartRow(
                SECTION, f"{gemm} {operand}", formats.scaled(name), formats.element(name, operand), "element"
            )
    outside = formats.num_layers - formats.num_fp8_layers
    if formats.num_fp8_layers and outside:
        tensor = f"operands in the {outside} layers outside FP8"
        yield ChartRow(SECTION, tensor, params, formats.element(params, "input"), "element")
    for tensor in ("attention's query, key, value", "head's operands"):
        yield ChartRow(SECTION, tensor, params, formats.element(params, "input"), "element")
