"""Owns the heat maps of a report: what each quantity means, and its table of layers by time, as plain data.

A cell is the worst value of its interval of iterations (see `read`). Must not know how heat maps are drawn.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_fp8.report.html.curves import Curve, Floats, bucket_width
from megatron_fp8.report.html.figures import escape, rounded
from megatron_fp8.report.html.read import Run

# All heat maps of a file together: about 5 bytes a cell.
MOST_CELLS = 300_000
_MOST_COLUMNS, _FEWEST_COLUMNS = 128, 8


@dataclass(frozen=True)
class Quantity:
    """How a quantity is shown: `log2` where factors matter; `worst` says what a cell of several values is."""

    title: str
    log2: bool
    worst: str


_QUANTITIES: Mapping[str, Quantity] = {
    "amax": Quantity("amax: largest magnitude", True, "largest"),
    "scale": Quantity("scale: what tensors are multiplied by before the cast", True, "smallest"),
    "head-room-bits": Quantity("head-room in bits before a tensor clips (below 0: it would clip)", False, "smallest"),
    "history-max": Quantity("largest amax of the history", True, "largest"),
    "clipped": Quantity("clipped: share of elements above the largest FP8 number", False, "largest"),
    "flushed": Quantity("flushed: share of elements that became 0", False, "largest"),
    "error": Quantity("error: relative error of quantization", False, "largest"),
    "sqnr-db": Quantity("signal to quantization noise, dB", False, "smallest"),
    "grad-norm": Quantity("gradient norm before clipping", True, "largest"),
    "params-norm": Quantity("norm of the masters", True, "largest"),
}


def heat_maps(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A choice for each run and quantity: title, heat maps by tensor, and the common range of their colours."""
    num_series = sum(len(run.heat) for run in runs)
    columns = max(_FEWEST_COLUMNS, min(_MOST_COLUMNS, MOST_CELLS // max(1, num_series)))
    choices = []
    for run in runs:
        width = _common_width(run, columns)
        recorded = {cell.quantity for cell in run.heat}
        for name in [*_QUANTITIES, *sorted(recorded - set(_QUANTITIES))]:
            if name in recorded:
                choices.append(_choice(run, name, width, several=len(runs) > 1))
    return choices


def _common_width(run: Run, columns: int) -> int:
    curves = run.heat.values()
    if not curves:
        return 1
    widest = max(curve.width for curve in curves)
    # Few values may lie far apart: each is a column then.
    if max(curve.count for curve in curves) <= columns:
        return widest
    first, last = (min(curve.points()[0][0] for curve in curves), max(curve.points()[0][-1] for curve in curves))
    return max(widest, bucket_width(first, last, columns))


def _choice(run: Run, name: str, width: int, several: bool) -> dict[str, Any]:
    known = _QUANTITIES.get(name, Quantity(name, False, "largest"))
    tensors: dict[str, dict[int, Curve]] = {}
    for cell, curve in sorted(run.heat.items()):
        if cell.quantity == name:
            tensors.setdefault(cell.tensor, {})[cell.layer] = curve
    maps, low, high = [], math.inf, -math.inf
    for tensor, layers in tensors.items():
        x, z = _table(layers, width)
        if known.log2:
            # An amax of 0 has no logarithm: a gap.
            z = np.log2(np.where(z > 0, z, np.nan))
        finite = z[np.isfinite(z)]
        if len(finite):
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
        z[~np.isfinite(z)] = np.nan
        maps.append({"tensor": escape(tensor), "x": x.tolist(), "y": list(layers), "z": _packed(z)})
    return {
        "label": f"{run.name} · {known.title}" if several else known.title,
        "log2": known.log2,
        "says": f"A cell is the {known.worst} value of {width:,} iterations." if width > 1 else "",
        "low": rounded(low),
        "high": rounded(high),
        "maps": maps,
    }


def _table(layers: Mapping[int, Curve], width: int) -> tuple[Floats, Floats]:
    """First iterations of the columns, and values of layers by columns; NaN where nothing was recorded."""
    rows = [curve.columns(width) for curve in layers.values()]
    numbers = np.unique(np.concatenate([row[0] for row in rows]))
    table = np.full((len(rows), len(numbers)), np.nan)
    for row, (places, values) in zip(table, rows, strict=True):
        row[np.searchsorted(numbers, places)] = values
    return numbers * width, table


def _packed(table: Floats) -> dict[str, str]:
    """plotly.js's form of a typed array: FP32, little endian, in base64."""
    return {
        "dtype": "f4",
        "bdata": base64.b64encode(table.astype("<f4").tobytes()).decode("ascii"),
        "shape": f"{table.shape[0]}, {table.shape[1]}",
    }
