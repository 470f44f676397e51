"""Records of a run, and the file that holds them: `metrics.jsonl`, one JSON object per line.

Series have Megatron's names. All views (console, dashboards, reports) are made from these records. Must not know where
the numbers come from. Imports no torch.
"""

import json
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from megatron_fp8.config.problem import hide
from megatron_fp8.report.record_upgrade import upgraded

# JSON, and the numbers that JSON lacks.
Value: TypeAlias = "float | int | str | bool | Sequence[Value] | Mapping[str, Value] | None"
# A record as its readers get it.
Record = Mapping[str, Any]


class Sink(Protocol):
    """Where records are written: the file, or a view of it."""

    def write(self, record: Record) -> None:
        """Write a record; its `event` is its kind (`start`, `train`, `validation`, ...), its `time` a Unix time."""

    def close(self) -> None:
        """Flush and close."""


class Recorder:
    """Writes each record to every sink; without sinks (on all ranks but 0) a no-op.

    `secrets`: strings to remove from records, in addition to what looks like a password or a key.
    """

    def __init__(self, sinks: Sequence[Sink], secrets: Collection[str] = ()) -> None:
        self._sinks = list(sinks)
        self._secrets = secrets

    def write(self, event: str, values: Mapping[str, Value]) -> None:
        """Write a record of kind `event`."""
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
        """Replace the closed sinks."""
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


# Removed when the run resumes, from whatever iteration.
_LAST_EVENTS = ("end", "failure")
# Kept even when the run resumes from an earlier iteration.
_LASTING_EVENTS = ("rewind",)
_MOST_LINES_NAMED = 10


class BrokenLines:
    """Lines of a `metrics.jsonl` that are not records: how many, and the numbers, from 1, of the first ones."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[int] = []

    def add(self, number: int) -> None:
        """Count a line."""
        self.count += 1
        if len(self.first) < _MOST_LINES_NAMED:
            self.first.append(number)

    def __str__(self) -> str:
        """As `line 3 of metrics.jsonl is not a record and was skipped`; empty if there was none."""
        if not self.count:
            return ""
        numbers = ", ".join(f"{number:,}" for number in self.first)
        if self.count == 1:
            return f"line {numbers} of {METRICS} is not a record and was skipped"
        more = ", ..." if self.count > len(self.first) else ""
        return f"{self.count:,} lines of {METRICS} are not records and were skipped: {numbers}{more}"


def read_records(path: Path, broken: BrokenLines | None = None) -> Iterator[dict[str, Any]]:
    """The records of a `metrics.jsonl` in order, those of older versions converted. Raises OSError.

    Lines that are not records are skipped, and counted in `broken` before the next record is given. An incomplete last
    line, of a run that is writing it or was killed, is ignored.
    """
    for number, (_, record) in enumerate(_lines_and_records(path), start=1):
        if record is not None:
            yield upgraded(record)
        elif broken is not None:
            broken.add(number)


def drop_records_after(path: Path, iteration: int) -> None:
    """Remove from a `metrics.jsonl` what a run that resumes at `iteration` will repeat, and the end of the run.

    An incomplete last line is removed too; other broken lines stay, so that readers report them. Does nothing if there
    is no file.
    """
    if not path.exists():
        return
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as kept:
        for line, record in _lines_and_records(path):
            if record is None or _stays(record, iteration):
                kept.write(line)
    temporary.replace(path)


def _stays(record: Record, iteration: int) -> bool:
    """Whether a record stays valid when the run resumes at `iteration`."""
    event = record["event"]
    return event in _LASTING_EVENTS or (event not in _LAST_EVENTS and iteration_of(record, 0) <= iteration)


def iteration_of(record: Record, without: int) -> int:
    """The iteration of a record; `without`: the value for a record that has none."""
    value = record.get("iteration")
    return without if value is None else int(value)


def _lines_and_records(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line, _record(line)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        return None
    return record if type(record.get("iteration", 0)) is int else None


class JsonLines:
    """`metrics.jsonl`: every line is written at once, so a killed run leaves a readable file.

    NaN and infinities, which JSON lacks, are written as the strings "nan", "inf" and "-inf". An incomplete line, of
    a killed run or a full disk, is removed before the next one is written. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered: a failed write is not repeated later, out of order.
        self._file = path.open("ab+", buffering=0)
        self._cut_unfinished_line()

    def write(self, record: Record) -> None:
        """Append a complete line or nothing."""
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
    """A record as a line of `metrics.jsonl`, including the newline."""
    return json.dumps({key: _json_value(value) for key, value in record.items()}, allow_nan=False) + "\n"


def _json_value(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _json_value(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_json_value(each) for each in value]
    return value
