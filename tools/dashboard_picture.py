"""Draws the panels of the wandb dashboard from a run's record: python tools/dashboard_picture.py RUN docs/dashboard.png

The panels and their series are those of `tools/wandb_dashboard.py`, the values those of `metrics.jsonl`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_fp8.commands.dashboard import panels
from megatron_fp8.report.record import METRICS, read_records
from megatron_fp8.report.series import Section
from megatron_fp8.report.series_registry import series_of

Points = dict[str, list[tuple[int, float]]]
_COLUMNS = 4
_INCHES = (3.6, 2.3)


def points_of(record: Path) -> Points:
    """(iteration, value) by series; numbers that are not finite are left out."""
    points: Points = {}
    for each in read_records(record):
        found = series_of(each)
        if found is None:
            continue
        iteration, values = found
        for name, value in values.items():
            if math.isfinite(value):
                points.setdefault(name, []).append((iteration, value))
    return points


def drawn_panels(section: Section, points: Points) -> Mapping[str, Sequence[str]]:
    """The section's panels of which the run has something, by title."""
    found = {title: [name for name in names if name in points] for title, names in panels(section).items()}
    return {title: names for title, names in found.items() if names}


def draw(points: Points, sections: Sequence[Section], path: Path) -> None:
    """The panels of `sections`, one row of figures after the other."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    every = {section: drawn_panels(section, points) for section in sections}
    rows = {section: math.ceil(len(found) / _COLUMNS) for section, found in every.items()}
    figure = pyplot.figure(figsize=(_COLUMNS * _INCHES[0], sum(rows.values()) * _INCHES[1]), layout="constrained")
    parts = figure.subfigures(len(every), 1, height_ratios=list(rows.values()), squeeze=False)[:, 0]
    for part, (section, found) in zip(parts, every.items(), strict=True):
        part.suptitle(section.value, x=0.01, ha="left", weight="bold")
        axes = part.subplots(rows[section], _COLUMNS, squeeze=False).flatten()
        for axis in axes[len(found) :]:
            axis.set_axis_off()
        for axis, (title, names) in zip(axes, found.items(), strict=False):
            for name in names:
                marker = "o" if len(points[name]) == 1 else None
                axis.plot(*zip(*points[name], strict=True), label=name, linewidth=1.2, marker=marker)
            axis.set_title(title, fontsize=8)
            axis.tick_params(labelsize=6)
            if len(names) > 1:
                axis.legend(fontsize=5, frameon=False)
    figure.savefig(path, dpi=80)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the sections that are open at first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("picture", type=Path, metavar="PICTURE", help="PNG file to write")
    settings = parser.parse_args(arguments)
    if not (settings.run / METRICS).is_file():
        parser.error(f"RUN {settings.run}: no {METRICS} in it")
    draw(points_of(settings.run / METRICS), (Section.TRAINING, Section.THROUGHPUT), settings.picture)


if __name__ == "__main__":
    main()
