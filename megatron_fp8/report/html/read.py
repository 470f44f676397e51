"""Owns the reading of a run directory, in one pass and in memory that does not grow with the run's length.

Runs that go on, were killed or are of another version are read as far as they can be. Must not know how a run is shown.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_fp8.report.html.curves import Curve, Floats, Keep
from megatron_fp8.report.record import METRICS, BrokenLine, BrokenLines, read_records

Record = dict[str, Any]

CONFIG = "config.yaml"
_SERIES_EVENTS = frozenset({"train", "validation", "norms"})
_FP8_EVENTS = frozenset({"fp8", "fp8-check"})
# fp8/layers.3/self_attention.proj/input/amax
_FP8_OF_A_LAYER = re.compile(r"fp8/layers\.(?P<layer>\d+)/(?P<tensor>[^/]+/[^/]+)/(?P<quantity>[^/]+)")
# grad-norm/layers.3/qkv
_NORM_OF_A_LAYER = re.compile(r"(?P<quantity>[^/]+-norm)/layers\.(?P<layer>\d+)/(?P<tensor>[^/]+)")
_NOT_A_SERIES = frozenset({"event", "iteration", "time"})
# Of the numbers of an interval of the record that become one cell, the one to look at.
_SMALLEST_IS_WORST = frozenset({"scale", "head-room-bits", "sqnr-db"})
_HEAT_BUCKETS = 64
# Values of records not yet looked at.
_MOST_WAITING = 100_000
_FIRST_EVENTS, _LAST_EVENTS = 50, 250


class RunError(Exception):
    """What was named is not a run; the text says why and what to use instead."""


@dataclass(frozen=True, order=True)
class Cell:
    """Where a number of a layer belongs: quantity, tensor (`module/operand`, or kind of parameter), layer's number."""

    quantity: str
    tensor: str
    layer: int


@dataclass
class Run:
    """What a run directory says. `config`: values by `section.key`; `end`: its last record if that is an `end`."""

    name: str
    directory: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    curves: dict[str, Curve] = field(default_factory=dict)
    heat: dict[Cell, Curve] = field(default_factory=dict)
    start: Record = field(default_factory=dict)
    end: Record | None = None
    first_events: list[Record] = field(default_factory=list)
    last_events: deque[Record] = field(default_factory=lambda: deque(maxlen=_LAST_EVENTS))
    num_events: int = 0
    iteration: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def events(self) -> list[Record]:
        """The events that were kept, in their order."""
        return [*self.first_events, *self.last_events]


def records(path: Path) -> Iterator[Record | BrokenLine]:
    """As `read_records`. Raises RunError for a file that is not there or cannot be read."""
    try:
        yield from read_records(path)
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; name a run directory, as in runs/quickstart") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}") from error


def read_run(directory: Path, name: str | None = None) -> Run:
    """Read `metrics.jsonl` and `config.yaml` of a run directory; raises RunError where there is no record."""
    run = Run(name or directory.resolve().name, directory)
    broken = BrokenLines()
    # Records of the series, a block at a time: far fewer operations than a value at a time.
    blocks: dict[bool, list[Record]] = {False: [], True: []}
    waiting = {False: 0, True: 0}
    for record in records(directory / METRICS):
        if isinstance(record, BrokenLine):
            broken.add(record)
            continue
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
            if waiting[is_fp8] > _MOST_WAITING:
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
    """Where values of this name go: what is of a layer into its heat map, of FP8 nothing else is kept."""
    match = (_FP8_OF_A_LAYER if is_fp8 else _NORM_OF_A_LAYER).fullmatch(name)
    if match is None:
        return None if is_fp8 else run.curves.setdefault(name, Curve())
    cell = Cell(match["quantity"], match["tensor"], int(match["layer"]))
    if cell not in run.heat:
        run.heat[cell] = Curve(_HEAT_BUCKETS, Keep.SMALLEST if cell.quantity in _SMALLEST_IS_WORST else Keep.LARGEST)
    return run.heat[cell]


def number(value: object) -> float | None:
    """A number of the record, where those that JSON lacks are the texts "nan", "inf" and "-inf"; None for others."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else None


def read_config(directory: Path) -> dict[str, Any]:
    """The config of a run by dotted keys. Raises RunError where there is none that can be read."""
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
