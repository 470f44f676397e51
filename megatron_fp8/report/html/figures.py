"""Owns which curves a report shows, in which figures, and under which names and units: plain data for plotly.js.

Must not know how figures are drawn: colours are numbers of a palette. Every name from the record is data here; what
plotly would read as markup is escaped.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_fp8.report.html.curves import Floats
from megatron_fp8.report.html.read import Run

Figure = dict[str, Any]

LOSS, VALIDATION = "lm loss", "lm loss validation"
# Title, unit and what it says, of the series with a figure of their own, in the order shown.
_KNOWN = {
    "learning-rate": ("Learning rate", "", "Of the step that ends the interval."),
    "grad-norm": (
        "Gradient norm",
        "",
        "L2 norm before clipping, of the step that ends the interval; by kind of weight.",
    ),
    "params-norm": ("Norm of the weights", "", "L2 norm of the masters; by kind of weight."),
    "tokens-per-second": ("Throughput", "tokens/s", "All ranks together; evaluations and checkpoints do not count."),
    "iteration-time": ("Time per step", "s", "And its parts, as far as they are recorded."),
    "throughput": ("Model FLOPs", "TFLOP/s per GPU", "What the model needs, without recomputation."),
    "mfu": ("Model FLOPs utilisation", "%", "Share of the peak of the format of the blocks' GEMMs."),
    "slowest-rank": ("Slowest rank", "", "Number of the rank whose own passes took longest."),
    "pause-seconds": ("Pauses", "s", "Between two records, for evaluation and checkpoints."),
    "loss-scale": ("Loss scale", "", "Of the next step."),
    "skipped-iterations": ("Skipped steps", "steps", "Since the start, because of overflows."),
    "batch-size": ("Batch size", "samples", "Of an optimizer step, all ranks together."),
    "pipeline-bubble": ("Pipeline bubble", "%", "Share of a step in which stages wait, were all equally fast."),
    "peak-memory-bytes": ("Peak memory", "GB", "Since the start, of the rank that writes the record. GB: 1e9 bytes."),
}
SCALES = {"peak-memory-bytes": 1e-9, "mfu": 100.0, "pipeline-bubble": 100.0}
# A figure says nothing of these while they stay as they are.
_ONLY_IF_CHANGING = frozenset({"skipped-iterations", "slowest-rank", "batch-size", "pipeline-bubble"})
# Counters, and what other series say already.
_NO_FIGURE = re.compile(
    r"iteration|consumed-.*|seconds-left|data-wait-.*|tokens-per-second-per-gpu|lm loss validation ppl.*"
)
# Of these a step's time is made; `iteration-time/slowest-rank` and the like are the whole of it.
_TIME_PART = re.compile(r"(?!iteration-time).+-time")
# Of a large job the first nodes are shown.
_NODE = re.compile(r"node/(?P<number>\d+)/(?P<quantity>.+)")
_MOST_NODES = 16
_LOG_FROM = 100.0
_FROM_ZERO = frozenset({"tokens/s", "TFLOP/s per GPU", "%", "s", "GB", "steps", "samples"})


def figures(runs: Sequence[Run]) -> list[Figure]:
    """Every figure of curves; those without a value in any run are left out."""
    names = _in_order(name for run in runs for name in run.curves)
    sets = [name for name in names if name.startswith(f"{VALIDATION}/")]
    # A single set is the total.
    shown_sets = sets if len(sets) > 1 else []
    parts = time_parts(names)
    made = [_figure(runs, "Loss", "nats per token", "Training and validation.", [LOSS, VALIDATION, *shown_sets])]
    shown = {LOSS, VALIDATION, *sets, *_KNOWN}
    for name, (title, unit, says) in _KNOWN.items():
        extremes = {end for run in runs if (curve := run.curves.get(name)) for end in (curve.smallest, curve.largest)}
        if name in _ONLY_IF_CHANGING and len(extremes) <= 1:
            continue
        members = [name, *(member for member in names if member.startswith(f"{name}/"))]
        shown.update(members)
        made.append(_figure(runs, title, unit, says, [*members, *parts] if name == "iteration-time" else members))
    shown.update(parts)
    rest: dict[str, list[str]] = {}
    for name in names:
        if name not in shown and not _NO_FIGURE.fullmatch(name):
            node = _NODE.fullmatch(name)
            group = f"{node['quantity']} of nodes" if node else name.split("/")[0]
            if node is None or int(node["number"]) < _MOST_NODES:
                rest.setdefault(group, []).append(name)
    made += [_figure(runs, group, "", "", members) for group, members in rest.items()]
    return [dict(figure, id=f"figure-{index}") for index, figure in enumerate(made) if figure["traces"]]


def time_parts(names: Iterable[str]) -> list[str]:
    """Those of `names` that are parts of the time of a step."""
    return [name for name in names if _TIME_PART.fullmatch(name)]


def _figure(runs: Sequence[Run], title: str, unit: str, says: str, names: Sequence[str]) -> Figure:
    traces, summaries, gaps = [], [], []
    smallest, largest = math.inf, -math.inf
    for place, run in enumerate(runs):
        for index, name in enumerate(names):
            curve = run.curves.get(name)
            if curve is None:
                continue
            scale = SCALES.get(name.split("/")[0], 1.0)
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
    # A rate or an amount is read from 0 on.
    from_zero = unit in _FROM_ZERO
    wide = not from_zero and smallest > 0 and smallest * _LOG_FROM <= largest < math.inf
    return {
        "title": title,
        "says": says,
        "unit": unit,
        "axis": escape(", ".join(filter(None, [unit or title, "log" if wide else ""]))),
        "log": wide,
        "from_zero": from_zero,
        "traces": traces,
        "summary": summaries,
        "gaps": gaps,
    }


def _trace(label: str, iterations: Floats, values: Floats, colour: int, index: int, name: str) -> dict[str, Any]:
    # Nothing was measured between two evaluations: each is a marker.
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
    """Six digits, which is more than a screen shows; None, a gap, for what is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def short(value: float) -> str:
    """A number for people."""
    if abs(value) >= 1e4:
        return f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.4g}"
    return f"{value:.4g}"


def escape(text: str) -> str:
    """Text that plotly, which knows a few tags and entities, shows as it is."""
    return html.escape(text, quote=False)


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
