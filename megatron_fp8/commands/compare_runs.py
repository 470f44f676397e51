"""Finds the first step at which two runs differ, series by series, and lists the config keys that differ.

Exit code 0: both runs have the same steps with equal values; 1: they differ; 2: wrong input. Config keys do not count,
since two configs are often meant to give equal numbers. Time, speed and memory are compared with --all only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fp8.report.events import MEASUREMENTS
from megatron_fp8.report.record import METRICS, BrokenLines, Record
from megatron_fp8.report.run_reader import RunError, read_config, records
from megatron_fp8.report.series import Kind
from megatron_fp8.report.series_registry import find

# Records of steps; the other events depend on how jobs started, waited and saved.
EVENTS = MEASUREMENTS | {"fp8-fallback", "spike", "skip"}
_MAX_SERIES_SHOWN = 40
_MISSING = "not recorded"

# By label and key of the record.
Step = dict[tuple[str, str], Any]


@dataclass(frozen=True)
class Tolerance:
    """Numbers are equal if |a - b| <= atol + rtol * |b|; if both are 0, bit for bit.

    A value that is not finite is a string in the record, equal to the same string.
    """

    rtol: float = 0.0
    atol: float = 0.0

    def equal(self, a: object, b: object) -> bool:
        """Whether two recorded values are equal."""
        if not isinstance(a, int | float) or not isinstance(b, int | float) or bool in (type(a), type(b)):
            return a == b and type(a) is type(b)
        if self.rtol == self.atol == 0:
            return float(a).hex() == float(b).hex()
        return abs(a - b) <= self.atol + self.rtol * abs(b)


@dataclass
class Difference:
    """How a series differs: first iteration and values, number of steps, largest difference."""

    iteration: int
    a: object
    b: object
    count: int = 0
    largest: float = 0.0


@dataclass
class Comparison:
    """The result. `only`: by run, the first step that the other run lacks, and their number."""

    series: dict[str, Difference] = field(default_factory=dict)
    num_series: set[str] = field(default_factory=set)
    of_machine: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)
    num_steps: int = 0
    only: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether the runs are equal."""
        return not self.series and not self.only


def steps(path: Path) -> Iterator[tuple[int, Step]]:
    """Iteration and values of each recorded step, in order. Raises RunError for a file that is not a run's record."""
    found = False
    newest = -1
    for iteration, group in itertools.groupby(_of_steps(path), key=lambda record: record["iteration"]):
        if iteration <= newest:
            raise RunError(f"{path} jumps back from iteration {newest} to {iteration}; it is not one run's record")
        found, newest = True, iteration
        step: Step = {}
        for record in group:
            layer = f" of layer {record['layer']}" if record["event"] == "fp8-fallback" else ""
            for name, value in record.items():
                if name not in ("event", "iteration", "time"):
                    step[f"{record['event']}: {name}{layer}", name] = value
        yield iteration, step
    if not found:
        raise RunError(f"{path} has no recorded step yet; wait for logging.log_interval steps")


def _of_steps(path: Path) -> Iterator[Record]:
    broken = BrokenLines()
    for record in itertools.chain(records(path, broken), [None]):
        if broken.count:
            raise RunError(f"{path}, line {broken.first[0]} is not a record of a run")
        if record is not None and record["event"] in EVENTS:
            if "iteration" not in record:
                raise RunError(f"{path} has a {record['event']} record without iteration")
            yield record


def compare(a: Path, b: Path, tolerance: Tolerance, everything: bool, ignore: re.Pattern[str] | None) -> Comparison:
    """Compare two `metrics.jsonl` step by step, in constant memory."""
    result = Comparison()
    left, right = steps(a), steps(b)
    step_a, step_b = next(left, None), next(right, None)
    while step_a is not None or step_b is not None:
        if step_b is None or (step_a is not None and step_a[0] < step_b[0]):
            assert step_a is not None
            _only(result, "A", step_a[0])
            step_a = next(left, None)
        elif step_a is None or step_b[0] < step_a[0]:
            _only(result, "B", step_b[0])
            step_b = next(right, None)
        else:
            _compare_step(result, step_a[0], step_a[1], step_b[1], tolerance, everything, ignore)
            step_a, step_b = next(left, None), next(right, None)
    return result


def _only(result: Comparison, run: str, iteration: int) -> None:
    first, count = result.only.get(run, (iteration, 0))
    result.only[run] = (first, count + 1)


def _compare_step(
    result: Comparison,
    iteration: int,
    a: Step,
    b: Step,
    tolerance: Tolerance,
    everything: bool,
    ignore: re.Pattern[str] | None,
) -> None:
    result.num_steps += 1
    for key in dict.fromkeys([*a, *b]):
        name = key[0]
        if not everything and (entry := find(key[1])) is not None and entry.series.kind is Kind.MACHINE:
            result.of_machine.add(name)
            continue
        if ignore is not None and ignore.search(name):
            result.ignored.add(name)
            continue
        result.num_series.add(name)
        value_a, value_b = a.get(key, _MISSING), b.get(key, _MISSING)
        if tolerance.equal(value_a, value_b):
            continue
        difference = result.series.setdefault(name, Difference(iteration, value_a, value_b))
        difference.count += 1
        if _is_number(value_a) and _is_number(value_b):
            difference.largest = max(difference.largest, abs(value_a - value_b))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def describe(result: Comparison, config_a: dict[str, Any], config_b: dict[str, Any]) -> Iterator[str]:
    """The result as lines, the most important first."""
    if result.equal:
        yield f"equal: {result.num_steps:,} recorded steps, {len(result.num_series):,} series"
    else:
        firsts = [d.iteration for d in result.series.values()] + [first for first, _ in result.only.values()]
        yield f"different from iteration {min(firsts):,} ({result.num_steps:,} steps are recorded in both runs)"
    for run, (first, count) in sorted(result.only.items()):
        yield f"steps recorded only in {run}: {count:,}, from iteration {first:,}"
    yield from _describe_series(result)
    if result.of_machine:
        yield "not compared: time, speed and memory (--all compares them): " + ", ".join(sorted(result.of_machine))
    if result.ignored:
        yield f"not compared because of --ignore: {len(result.ignored):,} series"
    missing = object()
    keys = [
        key for key in dict.fromkeys([*config_a, *config_b]) if config_a.get(key, missing) != config_b.get(key, missing)
    ]
    yield f"config keys that differ: {len(keys)}"
    for key in keys:
        yield f"  {key}: {_show(config_a.get(key, 'not set'))} and {_show(config_b.get(key, 'not set'))}"


def _describe_series(result: Comparison) -> Iterator[str]:
    ordered = sorted(result.series.items(), key=lambda item: item[1].iteration)
    for run, missing in (("A", "b"), ("B", "a")):
        alone = [(name, found) for name, found in ordered if getattr(found, missing) == _MISSING]
        if alone:
            name, found = alone[0]
            line = f"series recorded only in {run}: {len(alone):,}"
            yield f"{line}, the first at iteration {found.iteration:,}: {name}"
    both = [(name, found) for name, found in ordered if _MISSING not in (found.a, found.b)]
    for name, found in both[:_MAX_SERIES_SHOWN]:
        line = f"  {name}: first at iteration {found.iteration:,}: {_show(found.a)} and {_show(found.b)}"
        line += f"; differs in {found.count:,} steps"
        yield line + (f", by at most {found.largest:.3g}" if found.largest else "")
    if len(both) > _MAX_SERIES_SHOWN:
        yield f"  and {len(both) - _MAX_SERIES_SHOWN:,} more series"


def _show(value: object) -> str:
    # Numbers with all digits: they may differ in the last one.
    return value if isinstance(value, str) else json.dumps(value, default=str)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare and print; exit codes as above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="A", help="run directory")
    parser.add_argument("b", type=Path, metavar="B", help="run directory; the reference of --rtol")
    parser.add_argument("--rtol", type=float, default=0.0, help="equal if |a - b| <= ATOL + RTOL * |b| (default: 0)")
    parser.add_argument(
        "--atol", type=float, default=0.0, help="see --rtol; if both are 0, values must be equal bit for bit"
    )
    parser.add_argument("--all", action="store_true", help="also compare time, speed and memory")
    parser.add_argument("--ignore", metavar="REGEX", help="do not compare series whose name matches, e.g. ^fp8")
    settings = parser.parse_args(arguments)
    for name in ("rtol", "atol"):
        value = getattr(settings, name)
        if not 0 <= value < math.inf:
            parser.error(f"--{name} {value} is not a tolerance; use a finite number >= 0, e.g. 1e-5")
    try:
        ignore = re.compile(settings.ignore) if settings.ignore else None
    except re.error as error:
        parser.error(f"--ignore {settings.ignore} is not a regular expression: {error}")
    try:
        tolerance = Tolerance(settings.rtol, settings.atol)
        result = compare(settings.a / METRICS, settings.b / METRICS, tolerance, settings.all, ignore)
        config_a, config_b = read_config(settings.a), read_config(settings.b)
    except RunError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(f"A {settings.a}\nB {settings.b}")
    for line in describe(result, config_a, config_b):
        print(line)
    sys.exit(0 if result.equal else 1)
