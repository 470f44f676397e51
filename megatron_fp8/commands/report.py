"""Writes the report of a run, or a comparison of several, as one HTML file that needs no network.

Also works for runs in progress, killed or failed. A run writes its own report when it ends: RUN/report.html.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_fp8.report.html import REPORT, write_report
from megatron_fp8.report.run_reader import Run, RunError, read_run


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the report; exit code 2: wrong run or output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory, e.g. runs/quickstart")
    parser.add_argument(
        "--output", type=Path, help="file to write (default: RUN/report.html; comparison.html for several runs)"
    )
    settings = parser.parse_args(arguments)
    directories: list[Path] = settings.runs
    several = len(directories) > 1
    output: Path = settings.output or (Path("comparison.html") if several else directories[0] / REPORT)
    if output.is_dir() or not output.absolute().parent.is_dir():
        problem = "is a directory" if output.is_dir() else f"cannot be written: no directory {output.parent}"
        parser.error(f"--output {output} {problem}; use a file in an existing directory")
    runs: list[Run] = []
    problems = []
    for directory, name in zip(directories, _names(directories), strict=True):
        try:
            runs.append(read_run(directory, name))
        except RunError as error:
            problems.append(f"RUN {directory}: {error}")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        sys.exit(2)
    try:
        write_report(runs, output)
    except OSError as error:
        print(f"--output {output} cannot be written: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"wrote {output}")


def _names(directories: list[Path]) -> list[str]:
    """Names of directories; equal names get their paths below the common directory."""
    paths = [directory.resolve() for directory in directories]
    names = []
    for path in paths:
        namesakes = {other for other in paths if other.name == path.name}
        shared = os.path.commonpath(namesakes) if len(namesakes) > 1 else path.parent
        names.append(str(path.relative_to(shared)))
    return names
