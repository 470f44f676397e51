"""Reads a run directory in one pass, in memory that does not grow with the length of the run.

Runs that are in progress, were killed or are from another version are read as far as possible.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_fp8.report.curves import Curve, Floats, Keep
from megatron_fp8.report.record import METRICS, BrokenLines, Record, read_records
from megatron_fp8.report.series import Better, Kind
from megatron_fp8.report.series_registry import NOT_FINITE, find

CONFIG = "config.yaml"
_SERIES_EVENTS = frozenset({"train", "validation", "norms"})
_FP8_EVENTS = frozenset({"fp8", "fp8-check"})
_NOT_A_SERIES = frozenset({"event", "iteration", "time"})
_HEAT_BUCKETS = 64
# Most values in a block of records.
_MAX_WAITING = 100_000
_FIRST_EVENTS, _LAST_EVENTS = 50, 250


class RunError(Exception):
    """Not a run directory, or an unreadable one; the message says why and what to use instead."""


@dataclass
class Run:
    """Contents of a run directory. `config`: by `section.key`; `end`: the last record if it is an `end`.

    `curves`, `heat`: by series name; `heat` holds those of single layers.
    """

    name: str
    directory: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    curves: dict[str, Curve] = field(default_factory=dict)
    heat: dict[str, Curve] = field(default_factory=dict)
    start: Record = field(default_factory=dict)
    startup: Record = field(default_factory=dict)
    end: Record | None = None
    first_events: list[Record] = field(default_factory=list)
    last_events: deque[Record] = field(default_factory=lambda: deque(maxlen=_LAST_EVENTS))
    num_events: int = 0
    iteration: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def events(self) -> list[Record]:
        """The events that were kept, in order."""
        return [*self.first_events, *self.last_events]


def records(path: Path, broken: BrokenLines) -> Iterator[Record]:
    """As `read_records`, but raises RunError for a file that is missing or unreadable."""
    try:
        yield from read_records(path, broken)
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; name a run directory, as in runs/quickstart") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}") from error


def read_run(directory: Path, name: str | None = None) -> Run:
    """Read `metrics.jsonl` and `config.yaml` of a run directory; raises RunError if there is no record."""
    run = Run(name or directory.resolve().name, directory)
    broken = BrokenLines()
    # Series are read in blocks of records: far faster than value by value.
    blocks: dict[bool, list[Record]] = {False: [], True: []}
    waiting = {False: 0, True: 0}
    for record in records(directory / METRICS, broken):
        event = record["event"]
        run.end = record if event == "end" else None
        iteration = number(record.get("iteration"))
        if iteration is not None:
            run.iteration = max(run.iteration, int(iteration))
        if event not in _SERIES_EVENTS and event not in _FP8_EVENTS:
            _take_event(run, record)
        elif iteration is not None:
            is_fp8 = event in _FP8_EVENTS
            blocks[is_fp8].append(record)
            waiting[is_fp8] += len(record)
            if waiting[is_fp8] > _MAX_WAITING:
                _take_block(run, is_fp8, blocks[is_fp8])
                waiting[is_fp8] = 0
    for is_fp8, block in blocks.items():
        _take_block(run, is_fp8, block)
    if str(broken):
        run.notes.append(f"{broken}.")
    if not run.num_events and not run.curves and not run.heat:
        raise RunError(f"{directory / METRICS} holds no record of a run; wait until the run has started")
    try:
        run.config = read_config(directory)
        run.config_text = (directory / CONFIG).read_text(encoding="utf-8", errors="replace")
    except RunError as error:
        run.notes.append(f"{error}.")
    return run


def _take_event(run: Run, record: Record) -> None:
    if record["event"] == "start":
        run.start = record
    if record["event"] == "startup":
        run.startup = record
    run.num_events += 1
    kept = run.first_events if len(run.first_events) < _FIRST_EVENTS else run.last_events
    kept.append(record)


def _take_block(run: Run, is_fp8: bool, block: list[Record]) -> None:
    iterations = np.array([record["iteration"] for record in block], dtype=np.float64)
    for name in dict.fromkeys(itertools.chain.from_iterable(block)):
        if name not in _NOT_A_SERIES:
            _take_values(run, name, is_fp8, iterations, [record.get(name) for record in block])
    block.clear()


def _take_values(run: Run, name: str, is_fp8: bool, iterations: Floats, column: list[Any]) -> None:
    if not set(map(type, column)) <= {float, int}:
        figures = [number(value) for value in column]
        iterations = iterations[[figure is not None for figure in figures]]
        column = [figure for figure in figures if figure is not None]
    curve = _curve(run, name, is_fp8) if column else None
    if curve is not None:
        curve.extend(iterations, np.array(column, dtype=np.float64))


def _curve(run: Run, name: str, is_fp8: bool) -> Curve | None:
    """The curve of this name; of FP8 records only those of heat maps are kept."""
    found = find(name)
    if found is None or found.series.kind is not Kind.HEAT:
        return None if is_fp8 else run.curves.setdefault(name, Curve())
    if name not in run.heat:
        keep = Keep.SMALLEST if found.series.better is Better.HIGHER else Keep.LARGEST
        run.heat[name] = Curve(_HEAT_BUCKETS, keep)
    return run.heat[name]


def number(value: object) -> float | None:
    """A value of a record as a number, "nan", "inf" and "-inf" included; None if it is not one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return float(value) if isinstance(value, str) and value in NOT_FINITE else None


def read_config(directory: Path) -> dict[str, Any]:
    """The config of a run by dotted keys. Raises RunError if it is missing or unreadable."""
    path = directory / CONFIG
    try:
        return flatten(yaml.safe_load(path.read_text(encoding="utf-8", errors="replace")))
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except (OSError, yaml.YAMLError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error


def flatten(config: object, prefix: str = "") -> dict[str, Any]:
    """A nested config by dotted keys; lists are values."""
    if not isinstance(config, dict) or not config:
        return {prefix.removesuffix("."): config} if prefix else {}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.")
    return flat
