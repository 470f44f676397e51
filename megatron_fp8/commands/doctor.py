"""Reports what is installed on a machine, and what of it works.

Alone, or on all ranks under torchrun. Exit code 1: training here would fail. What a machine only lacks is no fault.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fp8.doctor.examination import ORDER, DoctorOptions, examine
from megatron_fp8.doctor.finding import Finding, Status, Surroundings, launched

_FILE_WIDTH = 140
_STYLES = {Status.OK: "green", Status.ABSENT: "yellow", Status.FAULT: "bold red"}


@dataclass(frozen=True)
class Row:
    """A finding, and the ranks that have it."""

    finding: Finding
    ranks: tuple[int, ...]


def rows(by_rank: Sequence[Sequence[Finding]]) -> list[Row]:
    """Findings of all ranks: one row for what is well everywhere, else one for each thing that was found."""
    found: list[Row] = []
    for check in ORDER:
        of_check = [(rank, one) for rank, findings in enumerate(by_rank) for one in findings if one.check == check]
        groups: dict[tuple[Status, str], list[tuple[int, Finding]]] = {}
        for rank, one in of_check:
            # Sizes and times differ from rank to rank, and nobody has to act on them.
            groups.setdefault((one.status, "" if one.status is Status.OK else one.text), []).append((rank, one))
        found += [Row(group[0][1], tuple(rank for rank, _ in group)) for group in groups.values()]
    return found


def versions(by_rank: Sequence[Sequence[Finding]]) -> dict[str, str]:
    """The version matrix of rank 0; `same versions` says whether the others have it too."""
    return {name: text for finding in by_rank[0] for name, text in finding.versions.items()}


def num_faults(by_rank: Sequence[Sequence[Finding]]) -> int:
    """Rows that are faults."""
    return sum(row.finding.status is Status.FAULT for row in rows(by_rank))


def as_json(by_rank: Sequence[Sequence[Finding]]) -> str:
    """Everything as one JSON object."""
    findings = [
        {
            "check": row.finding.check,
            "status": row.finding.status.value,
            "text": row.finding.text,
            "advice": row.finding.advice,
            "ranks": list(row.ranks),
        }
        for row in rows(by_rank)
    ]
    report = {"faults": num_faults(by_rank), "versions": versions(by_rank), "findings": findings}
    return json.dumps(report, indent=2, ensure_ascii=False)


def show(by_rank: Sequence[Sequence[Finding]]) -> None:
    """Print the version matrix, the findings and a last line for people."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # A file has no width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)
    matrix = Table(title="Versions", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    names = list(versions(by_rank).items())
    half = -(-len(names) // 2)
    for place in range(half):
        right = names[half + place] if half + place < len(names) else ("", "")
        matrix.add_row(*names[place], *right)
    console.print(matrix)
    checks = Table(title="\nChecks", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in rows(by_rank):
        style, text = _STYLES[row.finding.status], row.finding.text
        if len(row.ranks) < len(by_rank):
            text = f"{_named(row.ranks)}: {text}"
        if row.finding.advice:
            text += f"\n→ {row.finding.advice}"
        checks.add_row(row.finding.check, f"[{style}]{row.finding.status.value}[/]", escape(text))
    console.print(checks)
    faults = num_faults(by_rank)
    console.print(f"\n[{_STYLES[Status.FAULT]}]{faults} faults[/]" if faults else "\nno fault")


def show_plainly(by_rank: Sequence[Sequence[Finding]]) -> None:
    """A line for each finding, where rich is what is missing."""
    for row in rows(by_rank):
        advice = f" -> {row.finding.advice}" if row.finding.advice else ""
        print(f"{row.finding.check}: {row.finding.status.value}: {row.finding.text}{advice}")
    print(f"{num_faults(by_rank)} faults")


def _named(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', ...' if len(ranks) > 8 else ''}"


def parse_arguments(arguments: Sequence[str] | None, program: str | None = None) -> argparse.Namespace:
    """Command line to settings; a wrong one exits with code 2."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--run-root", default="runs", help="directory of the runs, run.root of the config (runs)")
    parser.add_argument("--min-gpus", type=int, default=0, metavar="N", help="fewer GPUs than N are a fault (0)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="a check that takes longer is a fault (300)"
    )
    settings = parser.parse_args(arguments)
    if settings.timeout <= 0:
        parser.error(f"--timeout {settings.timeout}: a check needs some time; use 300")
    return settings


def main(arguments: Sequence[str] | None = None, program: str | None = None) -> None:
    """Examine, and report on rank 0; `program`: its name in `--help`."""
    settings = parse_arguments(arguments, program)
    rank, world_size = launched() or (0, 1)
    surroundings = Surroundings(settings.run_root, settings.min_gpus, rank, world_size)
    found = examine(DoctorOptions(surroundings, launched() is not None, settings.timeout))
    if rank == 0:
        if settings.json:
            print(as_json(found))
        elif importlib.util.find_spec("rich") is None:
            show_plainly(found)
        else:
            show(found)
        sys.stdout.flush()
    if num_faults(found):
        sys.exit(1)
