"""Writes `report.html`, a self-contained file that shows a run, or compares several.

plotly.js draws the figures, so that curves can be read off, zoomed and hidden, and follow the window's width and dark
mode. It is embedded compressed, which makes the file 2.0 MB instead of 4.8 MB.
"""

from __future__ import annotations

import base64
import gzip
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_fp8.report.html import tables
from megatron_fp8.report.html.figures import heat_maps, line_figures
from megatron_fp8.report.run_reader import Run, read_run

REPORT = "report.html"
_HERE = Path(__file__).parent


def render(runs: Sequence[Run]) -> str:
    """The page of a run, or of several that are compared. Everything from the runs is escaped."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    config = tables.config(runs)
    curves, heat = line_figures(runs), heat_maps(runs)
    return environment.get_template("template.html").render(
        runs=runs,
        title=" / ".join(run.name for run in runs),
        tables=tables,
        numbers=tables.numbers(runs),
        environment=tables.environment(runs),
        config=config,
        differences=[row for row in config if row.differs],
        figures=curves,
        heat=heat,
        data={"figures": curves, "heat": heat},
        css=_own("style.css"),
        script=_own("report.js"),
        plotly=_plotly(),
    )


def write_report(runs: Sequence[Run], output: Path) -> None:
    """Write the page atomically. Raises OSError."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(render(runs), encoding="utf-8")
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def report_at_end(run_directory: Path) -> None:
    """Write a run's `report.html`. An error is printed and does not fail the run."""
    try:
        write_report([read_run(run_directory)], run_directory / REPORT)
    except Exception as error:  # noqa: BLE001 - see above
        print(
            f"{run_directory / REPORT} was not written: {type(error).__name__}: {error}; "
            f"write it with python tools/report.py {run_directory}",
            file=sys.stderr,
        )


def _own(name: str) -> Markup:
    """A file of this package to insert into the page as it is."""
    return Markup((_HERE / name).read_text(encoding="utf-8"))


def _plotly() -> str:
    # Importing it takes 0.1 s.
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), compresslevel=6, mtime=0)).decode("ascii")
