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
