"""Checks that a machine is ready to train: versions, GPUs, libraries, collectives, file systems.

Runs standalone, or on all ranks under torchrun. Exit code 1: training here would fail.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fp8.doctor.examination import ORDER, DoctorOptions, examine
from megatron_fp8.doctor.finding import Finding, HostContext, Status, launched

_FILE_WIDTH = 140
_STYLES = {Status.OK: "green", Status.ABSENT: "yellow", Status.FAULT: "bold red"}


@dataclass(frozen=True)
class Row:
    """A finding, and the ranks that have it."""

    finding: Finding
    ranks: tuple[int, ...]


def rows(by_rank: Sequence[Sequence[Finding]]) -> list[Row]:
    """Findings of all ranks: one row per check if all are ok, else one per distinct finding."""
    found: list[Row] = []
    for check in ORDER:
        of_check = [(rank, one) for rank, findings in enumerate(by_rank) for one in findings if one.check == check]
        groups: dict[tuple[Status, str], list[tuple[int, Finding]]] = {}
        for rank, one in of_check:
            # The texts of good findings differ in sizes and times, which need no action.
            groups.setdefault((one.status, "" if one.status is Status.OK else one.text), []).append((rank, one))
        found += [Row(group[0][1], tuple(rank for rank, _ in group)) for group in groups.values()]
    return found


def versions(by_rank: Sequence[Sequence[Finding]]) -> dict[str, str]:
    """Rank 0's version matrix; the check `same versions` compares the others with it."""
    return {name: text for finding in by_rank[0] for name, text in finding.versions.items()}


def num_faults(by_rank: Sequence[Sequence[Finding]]) -> int:
    """Number of rows with a fault."""
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
    """Print version matrix, findings and verdict as tables."""
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
    console.print(f"\n[{_STYLES[Status.FAULT]}]{faults} faults[/]" if faults else "\nno faults")


def show_plainly(by_rank: Sequence[Sequence[Finding]]) -> None:
    """One line per finding, for when rich is not installed."""
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
    parser.add_argument(
        "--run-root", default="runs", help="directory of the runs, as run.root in the config (default: runs)"
    )
    parser.add_argument(
        "--min-gpus", type=int, default=0, metavar="N", help="fewer than N GPUs are a fault (default: 0)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time limit of each check; exceeding it is a fault (default: 300)",
    )
    settings = parser.parse_args(arguments)
    if settings.timeout <= 0:
        parser.error(f"--timeout {settings.timeout}: must be positive; use 300")
    return settings


def main(arguments: Sequence[str] | None = None, program: str | None = None) -> None:
    """Run the checks and report on rank 0; `program`: the name in `--help`."""
    settings = parse_arguments(arguments, program)
    rank, world_size = launched() or (0, 1)
    context = HostContext(settings.run_root, settings.min_gpus, rank, world_size)
    found = examine(DoctorOptions(context, launched() is not None, settings.timeout))
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
