"""Writes `report.html`, a self-contained file that shows a run, or compares several.

plotly.js draws, rather than pictures made beforehand: curves can be read off, zoomed and hidden, follow the width of
the window and the reader's dark mode. It is embedded compressed, 2.0 MB instead of 4.8 MB a file.
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
    """The page for one run, or for several that are compared. Whatever comes from the runs is escaped."""
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
    """Write the page; a reader sees the old one or the whole new one. Raises OSError."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(render(runs), encoding="utf-8")
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def report_at_end(run_directory: Path) -> None:
    """Write a run's `report.html`. What goes wrong is said, and nothing else: the run is worth more than its view."""
    try:
        write_report([read_run(run_directory)], run_directory / REPORT)
    except Exception as error:  # noqa: BLE001 - see above
        print(
            f"{run_directory / REPORT} was not written: {type(error).__name__}: {error}; "
            f"make it with python tools/report.py {run_directory}",
            file=sys.stderr,
        )


def _own(name: str) -> Markup:
    """A file of this package that goes into the page as it is."""
    return Markup((_HERE / name).read_text(encoding="utf-8"))


def _plotly() -> str:
    # Importing it takes a tenth of a second, which only a report is worth.
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), compresslevel=6, mtime=0)).decode("ascii")
