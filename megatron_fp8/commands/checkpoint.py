"""Inspects, verifies and compares checkpoints.

PATH is a checkpoint, a directory of checkpoints, or a run directory such as runs/quickstart; of several checkpoints the
latest is taken, unless --iteration names another. Nothing is changed; only diff needs torch.
Exit codes: 0: intact, or equal; 1: corrupt, different, or no checkpoint; 2: wrong path or option.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fp8.checkpoint.directory import (
    CHECKPOINTS,
    TRACKER,
    CheckpointDirectory,
    find_directory,
    lock_for_reading,
    locked_choice,
)
from megatron_fp8.checkpoint.manifest import MANIFEST, CheckpointError, find_corruption, read_manifest
from megatron_fp8.checkpoint.plain_index import read_plain_index
from megatron_fp8.errors import BadInputError

if TYPE_CHECKING:
    from megatron_fp8.checkpoint.difference import TensorDifference


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The settings of a command line; wrong usage exits with code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="show contents: tensors by kind, layout, versions, counters")
    inspect.add_argument("path", type=Path, metavar="PATH")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor, not only totals by kind")
    inspect.add_argument("--config", action="store_true", help="print the config of the run that wrote it, too")
    verify = commands.add_parser("verify", help="check every file against the manifest")
    verify.add_argument("path", type=Path, metavar="PATH")
    verify.add_argument("--sizes-only", action="store_true", help="compare file sizes only (fast; misses bit flips)")
    diff = commands.add_parser("diff", help="compare two checkpoints tensor by tensor, whatever layouts wrote them")
    diff.add_argument("path", type=Path, metavar="FIRST")
    diff.add_argument("second", type=Path, metavar="SECOND")
    diff.add_argument("--only", default="", metavar="TEXT", help="only tensors with TEXT in their names")
    diff.add_argument("--all", action="store_true", help="list equal tensors, too")
    latest = commands.add_parser("latest", help="print the path of the latest checkpoint")
    latest.add_argument("path", type=Path, metavar="PATH")
    for command in (inspect, verify, diff):
        command.add_argument("--iteration", type=int, metavar="N", help="iteration to use (default: the latest)")
    for command in (inspect, verify, diff, latest):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(arguments)


def existing_directory(path: Path) -> CheckpointDirectory:
    """The directory of checkpoints at `path`, one with only a tracker included. Raises BadInputError."""
    directory = find_directory(path)
    trackers = [candidate for candidate in (path, path / CHECKPOINTS) if (candidate / TRACKER).exists()]
    if directory is None and trackers:
        directory = CheckpointDirectory(trackers[0])
    if directory is None:
        what = "there is no checkpoint in it" if path.is_dir() else "there is no such directory"
        raise BadInputError(f"{path}: {what}; use the path of a run, of its checkpoints, or of one of them")
    return directory


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint, intact or corrupt."""
    named = CheckpointDirectory(path.parent).iteration(path) is not None
    return path.is_dir() and (named or (path / MANIFEST).exists())


def find_checkpoint(path: Path, iteration: int | None) -> Path:
    """The checkpoint at `path`, or that of `iteration` or the latest in it, perhaps corrupt. Raises BadInputError."""
    if is_checkpoint(path):
        return path
    directory = existing_directory(path)
    chosen = directory.latest() if iteration is None else iteration
    if chosen is None:
        raise BadInputError(f"{directory.root / TRACKER} is missing; use --iteration, one of {directory.iterations()}")
    if chosen not in directory.iterations():
        there = directory.iterations()
        raise BadInputError(
            f"{directory.root} has no checkpoint of iteration {chosen}; use --iteration, one of {there}"
        )
    return directory.path(chosen)


def inspect(settings: argparse.Namespace, reads: ExitStack) -> int:
    """Print the contents of a checkpoint."""
    path = _kept(reads, settings.path, settings.iteration)
    manifest, tensors = read_manifest(path), read_plain_index(path)
    problems = list(find_corruption(path, contents=False))
    kinds: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        kind = kinds.setdefault(_kind(name), {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": []})
        kind["tensors"] += 1
        kind["elements"] += tensor.num_elements
        kind["bytes"] += tensor.num_bytes
        kind["dtypes"] = sorted({*kind["dtypes"], tensor.dtype})
    facts = {
        "path": str(path),
        "iteration": manifest.iteration,
        "written": manifest.written,
        "bytes": manifest.num_bytes,
        "files": len(manifest.files),
        "problems": problems,
        "layout": dict(manifest.layout),
        "versions": {**manifest.versions, "format": str(manifest.format_version)},
        "counters": dict(manifest.counters),
        "lists": {name: list(values) for name, values in manifest.lists.items()},
    }
    if settings.json:
        listed = {name: {"shape": list(t.shape), "dtype": t.dtype, "bytes": t.num_bytes} for name, t in tensors.items()}
        _print_json({**facts, "kinds": kinds, "tensors": listed, "config": manifest.config})
    else:
        _print_facts(facts)
        _print_table(
            ("kind", "tensors", "elements", "dtypes", "bytes"),
            [
                (name, f"{kind['tensors']:,}", f"{kind['elements']:,}", " ".join(kind["dtypes"]), f"{kind['bytes']:,}")
                for name, kind in kinds.items()
            ],
        )
        if settings.tensors:
            rows = [
                (n, str(list(t.shape)), t.dtype, f"{t.num_bytes:,}", str(len(t.pieces))) for n, t in tensors.items()
            ]
            _print_table(("tensor", "shape", "dtype", "bytes", "pieces"), rows)
        if settings.config:
            print(manifest.config, end="")
    return 1 if problems else 0


def verify(settings: argparse.Namespace, reads: ExitStack) -> int:
    """Verify one checkpoint, or a directory's tracker and all its checkpoints."""
    if is_checkpoint(settings.path) or settings.iteration is not None:
        paths, found = [_kept(reads, settings.path, settings.iteration)], {}
    else:
        directory = existing_directory(settings.path)
        every = map(directory.path, directory.iterations())
        paths = [path for path in every if reads.enter_context(lock_for_reading(path))]
        found = {str(directory.root / TRACKER): _tracker_problems(directory)}
    found |= {str(path): list(find_corruption(path, contents=not settings.sizes_only)) for path in paths}
    if settings.json:
        _print_json({path: {"whole": not problems, "problems": problems} for path, problems in found.items()})
    else:
        for path, problems in found.items():
            for problem in problems:
                print(problem)
            if not problems:
                print(f"{path}: {'file sizes match' if settings.sizes_only else 'intact'}")
    return 1 if any(found.values()) else 0


def diff(settings: argparse.Namespace, reads: ExitStack) -> int:
    """Compare two checkpoints."""
    from megatron_fp8.checkpoint.difference import differences

    first = _kept(reads, settings.path, settings.iteration)
    second = _kept(reads, settings.second, settings.iteration)
    found = list(differences(first, second, settings.only))
    if not found:
        raise BadInputError(f"no tensor name contains {settings.only!r}; inspect --tensors lists them")
    unequal = [difference for difference in found if difference.kind != "equal"]
    if settings.json:
        # JSON has no infinity and NaN: they become strings.
        rows = [{k: _finite(v) for k, v in asdict(d).items()} for d in (found if settings.all else unequal)]
        _print_json({"first": str(first), "second": str(second), "tensors": rows, "equal": len(found) - len(unequal)})
    else:
        shown = found if settings.all else unequal
        if shown:
            header = ("tensor", "difference", "max abs", "max rel", "elements")
            _print_table(header, [_difference_row(difference) for difference in shown])
        print(f"{len(found) - len(unequal):,} tensors are equal, {len(unequal):,} differ")
    return 1 if unequal else 0


def latest(settings: argparse.Namespace, _: ExitStack) -> int:
    """Print the path of the latest checkpoint."""
    directory = existing_directory(settings.path)
    problems = _tracker_problems(directory)
    if not problems:
        iteration = directory.latest()
        assert iteration is not None
        path = directory.path(iteration)
        problems = list(find_corruption(path, contents=False))
    if problems:
        whole = directory.newest_intact(contents=False)
        newest = None if whole is None else str(directory.path(whole))
        if settings.json:
            _print_json({"latest": None, "problems": problems, "newest whole": newest})
        for problem in problems:
            print(problem, file=sys.stderr)
        print(f"newest intact checkpoint: {newest or 'none'}", file=sys.stderr)
        return 1
    if settings.json:
        _print_json({"latest": str(path), "iteration": iteration, "problems": []})
    else:
        print(path)
    return 0


_WORDS = {"shape": "shapes", "dtype": "dtypes", "first": "only in FIRST", "second": "only in SECOND"}


def _tracker_problems(directory: CheckpointDirectory) -> list[str]:
    try:
        iteration = directory.latest()
    except CheckpointError as error:
        return [str(error)]
    path = directory.root / TRACKER
    if iteration is None:
        return [f"{path} is missing"]
    if iteration not in directory.iterations():
        return [f"{path} says {iteration}, but there is no checkpoint of that iteration"]
    return []


def _kept(reads: ExitStack, path: Path, iteration: int | None) -> Path:
    """The result of `find_checkpoint`, locked so that a run that is training does not remove it."""
    return reads.enter_context(locked_choice(partial(find_checkpoint, path, iteration)))


def _kind(name: str) -> str:
    """The part of a tensor's name before that of its parameter, layer or rank."""
    return name.split(".")[0].split("@")[0]


def _difference_row(d: TensorDifference) -> tuple[str, ...]:
    kind = f"{_WORDS.get(d.kind, d.kind)} {d.detail}".strip()
    return d.name, kind, f"{d.max_abs:.3g}", f"{d.max_rel:.3g}", f"{d.num_different:,}"


def _print_facts(facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        if value == {}:
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} {_short(item)}" for key, item in value.items())
        elif isinstance(value, list):
            value = "; ".join(value) or "none"
        else:
            value = f"{value:,}" if name == "bytes" else value
        print(f"{name}: {value}")


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) and not value.is_integer() else str(value)


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal, tab-separated columns elsewhere."""
    if not sys.stdout.isatty():
        for row in (header, *rows):
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for number, name in enumerate(header):
        table.add_column(name, overflow="fold" if number == 0 else "ellipsis")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1, allow_nan=False)
    print()


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit codes as above."""
    settings = parse_arguments(arguments)
    commands = {"inspect": inspect, "verify": verify, "diff": diff, "latest": latest}
    try:
        with ExitStack() as reads:
            code = commands[settings.command](settings, reads)
    except (BadInputError, CheckpointError) as error:
        print(error, file=sys.stderr)
        code = 2 if isinstance(error, BadInputError) else 1
    if code:
        sys.exit(code)
