"""Converts records of older versions, so that readers know one format only. Imports no torch.

Older versions wrote lists, and every value of the `start` record, as strings joined by spaces or commas.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

_LAYOUT = re.compile(r"tp (\d+) x pp (\d+) x dp (\d+), (\d+) micro-batches of (\d+)")
_LAYOUT_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "num_microbatches",
    "micro_batch_size",
)
_CODE = re.compile(r"(?P<version>[^,]+)(?:, commit (?P<commit>[^,]+))?(?P<changes>, with changes)?")
_CHART_ROW = re.compile(r"  (?P<label>\S.*?) {2,}(?P<size>\S+) B per (?P<per_label>.+?), (?P<format_label>.+)")


def upgraded(record: dict[str, Any]) -> dict[str, Any]:
    """The record in the current format; only strings need a conversion."""
    event = record["event"]
    if event == "no-loss" and "sets" not in record:
        return {**record, **_without_loss(str(record.get("of")))}
    return _converted(record, _TEXTS[event]) if event in _TEXTS else record


def _converted(record: dict[str, Any], conversions: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Apply `conversions` by key; a string in an unknown form stays as it is."""
    converted = dict(record)
    for key, convert in conversions.items():
        if isinstance(value := record.get(key), str):
            with contextlib.suppress(ValueError):
                converted[key] = convert(value)
    return converted


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def _texts(text: str) -> list[str]:
    return text.split("; ") if text else []


def _without_loss(of: str) -> dict[str, Any]:
    validation = "the validation samples"
    if not of.startswith(validation):
        return {"of": "training", "sets": []}
    return {"of": "validation", "sets": [name for name in of.removeprefix(validation).strip().split(", ") if name]}


def _layout(text: str) -> dict[str, int] | str:
    match = _LAYOUT.fullmatch(text)
    return text if match is None else dict(zip(_LAYOUT_KEYS, map(int, match.groups()), strict=True))


def _versions(text: str) -> dict[str, str]:
    return {name: version for name, _, version in (part.rpartition(" ") for part in text.split(", "))}


def _code(text: str) -> dict[str, Any]:
    match = _CODE.fullmatch(text)
    if match is None:
        return {"version": text}
    return {"version": match["version"], "commit": match["commit"], "changes": bool(match["changes"])}


def _chart(text: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    section = ""
    for line in text.splitlines():
        match = _CHART_ROW.fullmatch(line)
        if match is None:
            section = line
        else:
            rows.append({"section_label": section, **match.groupdict(), "size": float(match["size"].replace(",", ""))})
    return rows


# By event, the keys that were strings.
_TEXTS: dict[str, dict[str, Callable[[str], Any]]] = {
    "checkpoint": {"removed": _integers},
    "fp8-check": {"fallen-back-layers": _integers},
    "hang": {"ranks": _integers},
    "profile": {"ranks": _integers},
    "replica": {"ranks": _integers, "hosts": str.split},
    "resume": {"notes": _texts},
    "rewind": {"notes": _texts},
    "start": {
        "versions": _versions,
        "precision": lambda text: {"description": text},
        "layout": _layout,
        "parameters": lambda text: int(text.replace(",", "")),
        "code": _code,
        "precision chart": _chart,
    },
}
