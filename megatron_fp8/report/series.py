"""Owns how the keys of a record become series of dashboards, and at which step. Imports no torch.

The step is the iteration: the number of optimizer steps done. Names are the record's keys, which are Megatron's.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from megatron_fp8.report.record import Record, iteration_of

_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class SeriesRule:
    """`prefix`: before each name. `without`: numbers that are no series. `counted`: lists, whose lengths are series."""

    prefix: str = ""
    without: Set[str] = frozenset()
    counted: Mapping[str, str] | None = None


# By kind of record. Kinds that are missing here have no series: they are told once, as text or as an alert.
SERIES: Mapping[str, SeriesRule] = {
    "train": SeriesRule(without={"seconds-left"}),
    "validation": SeriesRule(without={"consumed-tokens"}),
    "fp8": SeriesRule(),
    "norms": SeriesRule(),
    "fp8-check": SeriesRule(counted={"fallen-back-layers": "fp8/fallen-back-layers"}),
    "checkpoint": SeriesRule(prefix="checkpoint/"),
}
_NO_SERIES = {"event", "time", "iteration"}


def series_of(record: Record) -> tuple[int, dict[str, float]] | None:
    """(step, value by name) of a record, None where it has no series. Values that are withheld (null) are left out."""
    rule = SERIES.get(str(record["event"]))
    if rule is None:
        return None
    values = {}
    for key, value in record.items():
        if rule.counted is not None and key in rule.counted:
            values[rule.counted[key]] = float(len(value))
        elif key not in _NO_SERIES and key not in rule.without and _is_number(value):
            values[rule.prefix + key] = float(value)
    return iteration_of(record, 0), values


def _is_number(value: object) -> bool:
    """Numbers, also those that JSON lacks."""
    return value in _NOT_FINITE if isinstance(value, str) else isinstance(value, (int, float)) and value is not True
