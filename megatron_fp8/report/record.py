"""Owns what a record of a run is, and the file that keeps them: `metrics.jsonl`, one JSON object a line.

Series carry Megatron's names. Other views (console, dashboards) are made from the same records. Must not know where
the numbers come from. Imports no torch.
"""

import json
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from megatron_fp8.config.problem import hide
from megatron_fp8.report.record_upgrade import upgraded

# What a record may hold: JSON, with numbers that JSON lacks.
Value: TypeAlias = "float | int | str | bool | Sequence[Value] | Mapping[str, Value] | None"
# A record as its readers get it.
Record = Mapping[str, Any]


class Sink(Protocol):
    """A view of the record."""

    def write(self, record: Record) -> None:
        """Take one record; `event` says its kind (`start`, `train`, `validation`, `end`, ...), `time` when it was made,
        in seconds since 1970."""

    def close(self) -> None:
        """Write what is still to be written."""


class Recorder:
    """Hands each record to every sink; without sinks (every rank but one) it does nothing.

    `secrets`: texts that no record may hold, beside what looks like a password or a key.
    """

    def __init__(self, sinks: Sequence[Sink], secrets: Collection[str] = ()) -> None:
        self._sinks = list(sinks)
        self._secrets = secrets

    def write(self, event: str, values: Mapping[str, Value]) -> None:
        """Record `values` under the kind `event`."""
        if not self._sinks:
            return
        hidden = {key: _without_secrets(value, self._secrets) for key, value in values.items()}
        record = {"event": event, **hidden, "time": round(time.time(), 3)}
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def reopen(self, sinks: Sequence[Sink]) -> None:
        """Go on with other sinks in place of those that were closed."""
        self._sinks = list(sinks)


def _without_secrets(value: Value, secrets: Collection[str]) -> Value:
    if isinstance(value, str):
        return hide(value, secrets)
    if isinstance(value, Mapping):
        return {key: _without_secrets(each, secrets) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [_without_secrets(each, secrets) for each in value]
    return value


METRICS = "metrics.jsonl"


# Of a run that goes on they are no longer true.
_LAST_EVENTS = ("end", "failure")
# Of a run that goes on from before them they are true all the same.
_LASTING_EVENTS = ("rewind",)
_MOST_LINES_NAMED = 10


@dataclass(frozen=True)
class BrokenLine:
    """A line of a `metrics.jsonl` that is no record: its number, from 1 on."""

    number: int


class BrokenLines:
    """The broken lines that a reader met, for a person to be told."""

    def __init__(self) -> None:
        self._count = 0
        self._first: list[int] = []

    def add(self, line: BrokenLine) -> None:
        """Count a line."""
        self._count += 1
        if len(self._first) < _MOST_LINES_NAMED:
            self._first.append(line.number)

    def __str__(self) -> str:
        """`line 3 of metrics.jsonl is no record and was left out`; empty without any."""
        if not self._count:
            return ""
        numbers = ", ".join(f"{number:,}" for number in self._first)
        if self._count == 1:
            return f"line {numbers} of {METRICS} is no record and was left out"
        more = ", ..." if self._count > len(self._first) else ""
        return f"{self._count:,} lines of {METRICS} are no records and were left out: {numbers}{more}"


def read_records(path: Path) -> Iterator[dict[str, Any] | BrokenLine]:
    """The records of a `metrics.jsonl` in their order, those of older versions in today's form. Raises OSError.

    What follows the last end of a line is not read: a run that goes on is writing it, or a killed one left it there.
    """
    for _, record in _lines_and_records(path):
        yield record if isinstance(record, BrokenLine) else upgraded(record)


def drop_records_after(path: Path, iteration: int) -> None:
    """Leave out of a `metrics.jsonl` what a run that goes on from `iteration` will do again, and the end of the run.

    A line that a killed run left half written goes too; other broken lines stay, for readers to tell of. Nothing
    happens where there is no file.
    """
    if not path.exists():
        return
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as kept:
        for line, record in _lines_and_records(path):
            if isinstance(record, BrokenLine) or _stays(record, iteration):
                kept.write(line)
    temporary.replace(path)


def _stays(record: Record, iteration: int) -> bool:
    """Whether a record is true of a run that goes on from `iteration`."""
    event = record["event"]
    return event in _LASTING_EVENTS or (event not in _LAST_EVENTS and iteration_of(record, 0) <= iteration)


def iteration_of(record: Record, without: int) -> int:
    """The iteration that a record belongs to; `without`: what stands for none."""
    value = record.get("iteration")
    return without if value is None else int(value)


def _lines_and_records(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | BrokenLine]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield line, _record(line) or BrokenLine(number)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        return None
    return record if type(record.get("iteration", 0)) is int else None


class JsonLines:
    """`metrics.jsonl`: a line is whole once written, so a killed run leaves a readable file.

    NaN and infinities, which JSON lacks, are written as the strings "nan", "inf" and "-inf". What a killed run or a
    full disk left of a line is taken away, so that the next one does not become part of it. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered: nothing that failed is written again later, out of order.
        self._file = path.open("ab+", buffering=0)
        self._cut_unfinished_line()

    def write(self, record: Record) -> None:
        """Append one line, whole or not at all."""
        line = memoryview(json_line(record).encode())
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._cut_unfinished_line()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _cut_unfinished_line(self) -> None:
        size = position = self._file.seek(0, 2)
        while position > 0:
            start = max(position - 65536, 0)
            self._file.seek(start)
            newline = self._file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < size:
            self._file.truncate(position)


def json_line(record: Record) -> str:
    """A record as its line of `metrics.jsonl`, the line's end included."""
    return json.dumps({key: _json_value(value) for key, value in record.items()}, allow_nan=False) + "\n"


def _json_value(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _json_value(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_json_value(each) for each in value]
    return value
