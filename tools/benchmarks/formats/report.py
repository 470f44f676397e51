"""How a comparison is shown in text: two tables and a sentence for each mode. Imports no torch."""

from __future__ import annotations

import math
import statistics

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.formats.comparison import OPERANDS, Comparison

_WIDTH_CHARS = 190


def show(comparison: Comparison, console: Console) -> None:
    """Tables, drawn with lines on a terminal and as Markdown elsewhere."""
    if not console.is_terminal:
        console.width = _WIDTH_CHARS
    style = box.HEAVY_HEAD if console.is_terminal else box.MARKDOWN
    num_steps = comparison.config.training.train_iters
    console.print(
        f"{comparison.device}. {num_steps} steps; loss: mean of the last {comparison.num_last} steps, nats per token.",
        soft_wrap=True,
    )
    console.print(_losses(comparison, style))
    for difference in comparison.differences().values():
        console.print(difference.verdict, soft_wrap=True)
    console.print()
    console.print(_operands(comparison, style))


def _losses(comparison: Comparison, style: box.Box) -> Table:
    table = Table(box=style)
    table.add_column("mode", no_wrap=True)
    headings = (
        "loss",
        f"minus {comparison.reference}",
        "lowest",
        "highest",
        "seed spread",
        "larger",
        "skipped",
        "s/run",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    differences = comparison.differences()
    spread = comparison.spread()
    for mode, runs in comparison.runs.items():
        cells = [f"{statistics.fmean(comparison.numbers(mode).values()):.4f}"]
        found = differences.get(mode)
        if found is not None:
            cells += [f"{found.mean:+.4f}", f"{found.lowest:+.4f}", f"{found.highest:+.4f}"]
            cells += ["", {None: "unknown", True: "yes", False: "no"}[found.is_larger_than_spread]]
        else:
            is_reference = mode == comparison.reference
            cells += ["", "", "", f"{spread:.4f}" if is_reference and spread is not None else "", ""]
        num_skipped = sum(len(run.skipped) for run in runs.values())
        cells += [str(num_skipped) if num_skipped else "", f"{statistics.fmean(r.seconds for r in runs.values()):.0f}"]
        table.add_row(mode, *cells)
    return table


def _operands(comparison: Comparison, style: box.Box) -> Table:
    table = Table(
        box=style,
        title="Signal to quantization noise in the last step, dB, mean over layers and seeds",
        title_justify="left",
    )
    table.add_column("mode", no_wrap=True)
    for operand in OPERANDS:
        table.add_column(operand.replace("grad_output", "grad").replace("/", " "), justify="right")
    for mode in comparison.runs:
        found = comparison.operand_sqnr(mode)
        if found:
            table.add_row(mode, *(_decibel(found.get(operand)) for operand in OPERANDS))
    if not table.rows:
        table.add_row("none of the modes quantizes operands", *("" for _ in OPERANDS))
    return table


def _decibel(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if math.isfinite(value) else str(value)
