"""Owns what a record of a run is, and the file that keeps them: `metrics.jsonl`, one JSON object a line.

Series carry Megatron's names. Other views (console, dashboards) are made from the same records. Must not know where
the numbers come from. Imports no torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

Value = float | int | str | bool | None


class Sink(Protocol):
    """A view of the record."""

    def write(self, record: Mapping[str, Value]) -> None:
        """Take one record; `event` says its kind: `start`, `train`, `validation` or `end`."""

    def close(self) -> None:
        """Write what is still to be written."""


class Recorder:
    """Hands each record to every sink; without sinks (every rank but one) it does nothing."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, event: str, values: Mapping[str, Value]) -> None:
        """Record `values` under the kind `event`."""
        for sink in self._sinks:
            sink.write({"event": event, **values})

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


METRICS = "metrics.jsonl"


def drop_records_after(path: Path, iteration: int) -> None:
    """Leave out of a `metrics.jsonl` what a run that goes on from `iteration` will do again, and the end of the run.

    A line that a killed run left half written goes too. Nothing happens where there is no file.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["event"] != "end" and record.get("iteration", 0) <= iteration:
            kept.append(line)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


class JsonLines:
    """`metrics.jsonl`: a line is whole once written, so a killed run leaves a readable file.

    NaN and infinities, which JSON lacks, are written as the strings "nan", "inf" and "-inf".
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Mapping[str, Value]) -> None:
        """Append one line."""
        values = {key: _json_value(value) for key, value in record.items()}
        self._file.write(json.dumps(values, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _json_value(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
