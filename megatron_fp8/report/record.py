"""Owns what a record of a run is, and the file that keeps them: `metrics.jsonl`, one JSON object a line.

Series carry Megatron's names. Other views (console, dashboards) are made from the same records. Must not know where
the numbers come from. Imports no torch.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

Value = float | int | str | bool | None


class Sink(Protocol):
    """A view of the record."""

    def write(self, record: Mapping[str, Value]) -> None:
        """Take one record; `event` says its kind (`start`, `train`, `validation`, `end`, ...), `time` when it was made,
        in seconds since 1970."""

    def close(self) -> None:
        """Write what is still to be written."""


class Recorder:
    """Hands each record to every sink; without sinks (every rank but one) it does nothing."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, event: str, values: Mapping[str, Value]) -> None:
        """Record `values` under the kind `event`."""
        record = {"event": event, **values, "time": round(time.time(), 3)}
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def reopen(self, sinks: Sequence[Sink]) -> None:
        """Go on with other sinks in place of those that were closed."""
        self._sinks = list(sinks)


METRICS = "metrics.jsonl"


# Of a run that goes on they are no longer true.
_LAST_EVENTS = ("end", "failure")
# Of a run that goes on from before them they are true all the same.
_LASTING_EVENTS = ("rewind",)


def read_records(path: Path) -> Iterator[dict[str, Value]]:
    """The records of a `metrics.jsonl` in their order, none where there is no file.

    A line that a killed run left half written is passed over.
    """
    for _, record in _lines_and_records(path):
        yield record


def drop_records_after(path: Path, iteration: int) -> None:
    """Leave out of a `metrics.jsonl` what a run that goes on from `iteration` will do again, and the end of the run.

    A line that a killed run left half written goes too. Nothing happens where there is no file.
    """
    if not path.exists():
        return
    kept = [line for line, record in _lines_and_records(path) if _stays(record, iteration)]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def _stays(record: Mapping[str, Value], iteration: int) -> bool:
    """Whether a record is true of a run that goes on from `iteration`."""
    event = record["event"]
    return event in _LASTING_EVENTS or (event not in _LAST_EVENTS and iteration_of(record, 0) <= iteration)


def iteration_of(record: Mapping[str, Value], without: int) -> int:
    """The iteration that a record belongs to; `without`: what stands for none."""
    value = record.get("iteration")
    return without if value is None else int(value)


def _lines_and_records(path: Path) -> Iterator[tuple[str, dict[str, Value]]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield line, json.loads(line)
            except ValueError:
                continue


class JsonLines:
    """`metrics.jsonl`: a line is whole once written, so a killed run leaves a readable file.

    NaN and infinities, which JSON lacks, are written as the strings "nan", "inf" and "-inf". What a killed run or a
    full disk left of a line is taken away, so that the next one does not become part of it. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered: nothing that failed is written again later, out of order.
        self._file = path.open("ab+", buffering=0)
        self._cut_unfinished_line()

    def write(self, record: Mapping[str, Value]) -> None:
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


def json_line(record: Mapping[str, Value]) -> str:
    """A record as its line of `metrics.jsonl`, the line's end included."""
    return json.dumps({key: _json_value(value) for key, value in record.items()}, allow_nan=False) + "\n"


def _json_value(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
