"""Figures and heat maps of a report as plain data for plotly.js, as the series registry describes them.

Colors are indices into a palette. Names from the record are escaped where plotly would read them as markup. A cell of a
heat map is the worst value of its interval of iterations.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_fp8.report.curves import Curve, Floats, bucket_width
from megatron_fp8.report.run_reader import Run
from megatron_fp8.report.series import Better, Match, Series
from megatron_fp8.report.series_registry import STEP_PARTS, VALIDATION, find

Figure = dict[str, Any]

# Of a large job, the first nodes.
_MAX_NODES = 16
_MIN_LOG_RATIO = 100.0
_FROM_ZERO = frozenset({"tokens/s", "TFLOP/s per GPU", "%", "s", "GB", "steps", "samples"})
# In all heat maps of a file: about 5 bytes per cell.
MAX_CELLS = 300_000
_MAX_COLUMNS, _MIN_COLUMNS = 128, 8


def line_figures(runs: Sequence[Run]) -> list[Figure]:
    """All line figures that have a value in some run."""
    by_title: dict[str, list[str]] = {}
    for name in sorted(dict.fromkeys(name for run in runs for name in run.curves), key=_position):
        found = find(name)
        if found is None:
            by_title.setdefault(name.split("/")[0], []).append(name)
        elif found.series.in_report and int(found.fields.get("node", 0)) < _MAX_NODES:
            by_title.setdefault(found.title, []).append(name)
    made = [_figure(runs, title, _worth_showing(runs, names)) for title, names in by_title.items()]
    return [dict(figure, id=f"figure-{index}") for index, figure in enumerate(made) if figure["traces"]]


def _position(name: str) -> float:
    """Position in the registry; unlisted series come last."""
    found = find(name)
    return math.inf if found is None else found.position


def _worth_showing(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Without constant series that matter only if they change, and without a validation set that is the only one."""
    sets = [name for name in names if name.startswith(f"{VALIDATION}/")]
    first = find(names[0])
    if first is not None and first.series.only_if_changing:
        curves = [curve for run in runs if (curve := run.curves.get(names[0]))]
        if len({end for curve in curves for end in (curve.smallest, curve.largest)}) <= 1:
            return []
    return [name for name in names if len(sets) > 1 or name not in sets]


def time_parts(names: Iterable[str]) -> list[str]:
    """Those of `names` that are parts of a step's time."""
    return [name for name in names if (found := find(name)) is not None and found.title == STEP_PARTS]


def series_scale(name: str) -> float:
    """Factor from a series' unit in the record to that of its figure."""
    found = find(name)
    return 1.0 if found is None else found.series.scale


def _figure(runs: Sequence[Run], title: str, names: Sequence[str]) -> Figure:
    found = find(names[0]) if names else None
    unit, note = ("", "") if found is None else (found.series.unit, found.series.note)
    traces, summaries, gaps = [], [], []
    smallest, largest = math.inf, -math.inf
    for place, run in enumerate(runs):
        for index, name in enumerate(names):
            curve = run.curves.get(name)
            if curve is None:
                continue
            scale = series_scale(name)
            iterations, values = curve.points()
            label = name if len(runs) == 1 else f"{run.name} · {name}" if len(names) > 1 else run.name
            traces.append(_trace(label, iterations, values * scale, place if len(runs) > 1 else index, index, name))
            if curve.smallest is not None and curve.largest is not None and curve.last is not None:
                smallest, largest = min(smallest, curve.smallest), max(largest, curve.largest)
                summaries.append(
                    f"{label}: last {short(curve.last * scale)}, smallest {short(curve.smallest * scale)}, "
                    f"largest {short(curve.largest * scale)}" + (f" {unit}" if unit else "")
                )
            if curve.not_finite:
                gaps.append(f"{label}: {curve.not_finite:,} values are not finite and leave gaps.")
    # Axes of rates and amounts start at 0.
    from_zero = unit in _FROM_ZERO
    wide = not from_zero and smallest > 0 and smallest * _MIN_LOG_RATIO <= largest < math.inf
    return {
        "title": title,
        "says": note,
        "unit": unit,
        "axis": escape(", ".join(filter(None, [unit or title, "log" if wide else ""]))),
        "log": wide,
        "from_zero": from_zero,
        "traces": traces,
        "summary": summaries,
        "gaps": gaps,
    }


def _trace(label: str, iterations: Floats, values: Floats, colour: int, index: int, name: str) -> dict[str, Any]:
    # Evaluations are far apart, so each is a marker.
    marked = name.startswith(VALIDATION) or len(values) == 1
    return {
        "name": escape(label),
        "x": [int(value) for value in iterations],
        "y": [rounded(value) for value in values],
        "mode": "lines+markers" if marked else "lines",
        "dash": ("solid", "dash", "dot")[min(index, 2)] if marked else "solid",
        "colour": colour,
    }


def rounded(value: float) -> float | None:
    """Six digits, more than a screen shows; None, a gap, for values that are not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def short(value: float) -> str:
    """A number to read, with four digits."""
    if abs(value) >= 1e4:
        return f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.4g}"
    return f"{value:.4g}"


def escape(text: str) -> str:
    """Text that plotly, which interprets a few tags and entities, shows literally."""
    return html.escape(text, quote=False)


def heat_maps(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A choice per run and quantity: title, heat maps by tensor, and their common range of colors."""
    num_series = sum(len(run.heat) for run in runs)
    columns = max(_MIN_COLUMNS, min(_MAX_COLUMNS, MAX_CELLS // max(1, num_series)))
    choices = []
    for run in runs:
        width = _common_width(run, columns)
        found = [(match, curve) for name, curve in run.heat.items() if (match := find(name)) is not None]
        cells: dict[str, list[tuple[Match, Curve]]] = {}
        for match, curve in sorted(found, key=lambda cell: (cell[0].position, int(cell[0].fields["layer"]))):
            cells.setdefault(match.title, []).append((match, curve))
        for title, members in cells.items():
            label = f"{run.name} · {title}" if len(runs) > 1 else title
            choices.append(_choice(label, members, width))
    return choices


def _common_width(run: Run, columns: int) -> int:
    curves = run.heat.values()
    if not curves:
        return 1
    widest = max(curve.width for curve in curves)
    # A few values may be far apart: each is a column then.
    if max(curve.count for curve in curves) <= columns:
        return widest
    first, last = (min(curve.points()[0][0] for curve in curves), max(curve.points()[0][-1] for curve in curves))
    return max(widest, bucket_width(first, last, columns))


def _choice(label: str, cells: Sequence[tuple[Match, Curve]], width: int) -> dict[str, Any]:
    series: Series = cells[0][0].series
    worst = "smallest" if series.better is Better.HIGHER else "largest"
    tensors: dict[str, dict[int, Curve]] = {}
    for match, curve in cells:
        tensors.setdefault(match.fields["tensor"], {})[int(match.fields["layer"])] = curve
    maps, low, high = [], math.inf, -math.inf
    for tensor, layers in sorted(tensors.items()):
        x, z = _table(layers, width)
        if series.log2:
            # An amax of 0 has no logarithm: a gap.
            z = np.log2(np.where(z > 0, z, np.nan))
        finite = z[np.isfinite(z)]
        if len(finite):
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
        z[~np.isfinite(z)] = np.nan
        maps.append({"tensor": escape(tensor), "x": x.tolist(), "y": list(layers), "z": _packed(z)})
    return {
        "label": label,
        "log2": series.log2,
        "says": f"A cell is the {worst} value of {width:,} iterations." if width > 1 else "",
        "low": rounded(low),
        "high": rounded(high),
        "maps": maps,
    }


def _table(layers: Mapping[int, Curve], width: int) -> tuple[Floats, Floats]:
    """First iterations of the columns, and values `[layers, columns]`; NaN where nothing was recorded."""
    rows = [curve.columns(width) for curve in layers.values()]
    numbers = np.unique(np.concatenate([row[0] for row in rows]))
    table = np.full((len(rows), len(numbers)), np.nan)
    for row, (places, values) in zip(table, rows, strict=True):
        row[np.searchsorted(numbers, places)] = values
    return numbers * width, table


def _packed(table: Floats) -> dict[str, str]:
    """plotly.js's format of a typed array: FP32, little-endian, base64."""
    return {
        "dtype": "f4",
        "bdata": base64.b64encode(table.astype("<f4").tobytes()).decode("ascii"),
        "shape": f"{table.shape[0]}, {table.shape[1]}",
    }
