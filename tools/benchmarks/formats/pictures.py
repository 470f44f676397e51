"""The pictures of a comparison: loss curves with their differences, and noise by operand. Imports no torch."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.formats.comparison import KINDS, LINEARS, OPERANDS, Comparison, RunResult

_COLOUR, _REFERENCE_COLOUR, _BAND_COLOUR = "#cc3311", "#888888", "#dddddd"
_COLUMNS = 4
_DPI = 100
_NUM_COLOURS = 128


def draw_losses(comparison: Comparison, path: Path) -> None:
    """The curves on top; below, for each mode, the loss minus the reference's at the same seed and step.

    The band is the seed-to-seed spread of the reference; a thin line is a seed, the thick one their mean.
    """
    plt = _pyplot()
    modes = list(comparison.runs)
    others = [mode for mode in modes if mode != comparison.reference] if comparison.reference in modes else []
    num_rows = math.ceil(len(others) / _COLUMNS)
    figure = plt.figure(figsize=(10.5, 3.4 + 1.9 * num_rows), layout="constrained")
    grid = figure.add_gridspec(1 + num_rows, _COLUMNS, height_ratios=[1.7] + [1] * num_rows)
    top = figure.add_subplot(grid[0, :])
    colours = plt.get_cmap("tab10")
    for number, mode in enumerate(modes):
        top.plot(_mean_curve(comparison.runs[mode]), color=colours(number % 10), label=mode, linewidth=1.1)
    top.set_ylabel("lm loss, nats per token")
    top.set_xlabel("step")
    top.legend(ncols=2, fontsize=8)
    top.grid(alpha=0.3)
    limit = _largest_difference(comparison, others)
    first: Any = None
    for number, mode in enumerate(others):
        axis = figure.add_subplot(grid[1 + number // _COLUMNS, number % _COLUMNS], sharex=first, sharey=first)
        first = first or axis
        _draw_difference(axis, comparison, mode)
        axis.set_ylim(-limit, limit)
        axis.tick_params(labelleft=number % _COLUMNS == 0, labelsize=8)
        if number % _COLUMNS == 0:
            axis.set_ylabel(f"minus {comparison.reference}'s loss", fontsize=8)
    if others:
        band = "" if comparison.spread() is None else f"; grey: seed-to-seed spread of {comparison.reference}"
        figure.supxlabel(f"step. Thin: a seed, thick: mean over seeds{band}", fontsize=9)
    _save(figure, path)
    plt.close(figure)


def draw_sqnr(comparison: Comparison, path: Path) -> None:
    """A heat map: one row for each mode that quantizes, one column for each operand, dB in the cells."""
    plt = _pyplot()
    found = {mode: comparison.operand_sqnr(mode) for mode in comparison.runs}
    modes = [mode for mode, values in found.items() if values]
    figure, axis = plt.subplots(figsize=(10.5, 1.5 + 0.42 * max(len(modes), 1)), layout="constrained")
    if not modes:
        axis.text(0.5, 0.5, "none of the modes quantizes operands", ha="center", va="center")
        axis.set_axis_off()
    else:
        rows = [[found[mode].get(operand, math.nan) for operand in OPERANDS] for mode in modes]
        image = axis.imshow(rows, cmap="viridis", aspect="auto")
        middle = (image.norm.vmin + image.norm.vmax) / 2
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                if math.isfinite(value):
                    colour = "black" if value > middle else "white"
                    axis.text(x, y, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=8)
        axis.set_yticks(range(len(modes)), modes)
        kinds = [kind.replace("grad_output", "grad") for kind in KINDS]
        axis.set_xticks(range(len(OPERANDS)), kinds * len(LINEARS), fontsize=8)
        for number, linear in enumerate(LINEARS):
            axis.text(number * len(KINDS) + 1, -0.65, linear, ha="center", va="bottom", fontweight="bold")
            if number:
                axis.axvline(number * len(KINDS) - 0.5, color="white", linewidth=3)
        axis.tick_params(length=0)
        for spine in axis.spines.values():
            spine.set_visible(False)
        figure.colorbar(image, label="dB", pad=0.01)
    figure.suptitle(
        "Signal to quantization noise of GEMM operands in the last step, mean over layers and seeds", fontsize=10
    )
    _save(figure, path)
    plt.close(figure)


def _draw_difference(axis: Any, comparison: Comparison, mode: str) -> None:
    spread = comparison.spread()
    if spread is not None and math.isfinite(spread):
        axis.axhspan(-spread, spread, color=_BAND_COLOUR)
    axis.axhline(0, color=_REFERENCE_COLOUR, linewidth=0.8)
    curves = _difference_curves(comparison, mode)
    for curve in curves:
        axis.plot(curve, color=_COLOUR, linewidth=0.6, alpha=0.45)
    axis.plot(_mean(curves), color=_COLOUR, linewidth=1.6)
    axis.set_title(mode, fontsize=9)
    axis.grid(alpha=0.3)


def _difference_curves(comparison: Comparison, mode: str) -> list[list[float]]:
    reference = comparison.runs[comparison.reference]
    return [
        [ours - theirs for ours, theirs in zip(run.losses, reference[seed].losses, strict=True)]
        for seed, run in comparison.runs[mode].items()
    ]


def _largest_difference(comparison: Comparison, modes: list[str]) -> float:
    """Of the mean curves and the spread, so that one wild seed does not flatten everything; above 0."""
    values = [abs(value) for mode in modes for value in _mean(_difference_curves(comparison, mode))]
    values.append(comparison.spread() or 0.0)
    finite = [value for value in values if math.isfinite(value)]
    return 1.25 * max(finite, default=0.0) or 1.0


def _mean_curve(runs: Mapping[int, RunResult]) -> list[float]:
    return _mean([run.losses for run in runs.values()])


def _mean(curves: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*curves, strict=True)]


def _save(figure: Any, path: Path) -> None:
    """As a PNG of few colours: thin lines over each other have thousands of shades, and take three times the bytes."""
    from PIL import Image

    whole = io.BytesIO()
    figure.savefig(whole, dpi=_DPI)
    Image.open(whole).convert("RGB").quantize(_NUM_COLOURS).save(path, format="PNG", optimize=True)


def _pyplot() -> Any:
    # Imported when something is drawn, and without a screen.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
