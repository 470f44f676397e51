"""Levels, alert titles and texts of events, which are the records that are no measurements.

The console, the report's table of events and wandb's alerts show the same texts. An event that is not listed is shown
too, as information with all its keys. Must not know where events are shown. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from megatron_fp8.report.code_version import describe_code
from megatron_fp8.report.record import Record

# Their numbers are series; the console formats them.
MEASUREMENTS = frozenset({"train", "validation", "fp8", "fp8-check", "norms"})

# In the run directory.
PRECISION_CHART = "precision_chart.txt"


class Level(IntEnum):
    """How serious an event is. Warnings and errors are also alerts."""

    INFO = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True)
class EventKind:
    """`title`: of the alert. `text`: with the record's keys in braces; None: all keys and values.

    The iteration is shown before the text unless `says_iteration`: the text contains it, or does not need it.
    """

    level: Level = Level.INFO
    title: str | Callable[[Record], str] = ""
    text: str | Callable[[Record], str] | None = None
    says_iteration: bool = False


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _ranks(record: Record) -> str:
    ranks = record["ranks"]
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"


def _start(record: Record) -> str:
    hidden = ("event", "time", "emulated")
    texts = {"precision chart": f"{record.get('run directory')}/{PRECISION_CHART}"}
    for key, text in _START_TEXTS.items():
        # A string is from an older version and shown as it is.
        if isinstance(value := record.get(key), int | Mapping):
            texts[key] = text(value)
    return "\n".join(f"{key}: {texts.get(key, value)}" for key, value in record.items() if key not in hidden)


def _layout(sizes: Mapping[str, int]) -> str:
    tp, pp, dp = (sizes[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "data"))
    return f"tp {tp} x pp {pp} x dp {dp}, {sizes['num_microbatches']} micro-batches of {sizes['micro_batch_size']}"


def _pairs(values: Mapping[str, Any], between: str = " ") -> str:
    return ", ".join(f"{name}{between}{value}" for name, value in values.items())


_START_TEXTS: Mapping[str, Callable[[Any], str]] = {
    "versions": _pairs,
    "precision": lambda precision: str(precision["description"]),
    "layout": _layout,
    "parameters": "{:,}".format,
    # The version is among `versions`.
    "code": lambda code: describe_code(code).removeprefix(f"{code['version']}, "),
    "deterministic mode": lambda variables: ", ".join(filter(None, ["on", _pairs(variables, "=")])),
}


def _resume(record: Record) -> str:
    text = f"resumed from {record['checkpoint']} at iteration {record['iteration']}"
    text += ", weights only" if record["weights only"] else ""
    return " | ".join([text, *record["notes"]])


def _checkpoint(record: Record) -> str:
    megabytes = float(record["bytes"] or 0) / 1e6
    text = f"checkpoint {record['path']} | {megabytes:,.1f} MB in {float(record['seconds'] or 0.0):.1f} s"
    text += f", training waited {float(record['hold-up-seconds'] or 0.0):.2f} s"
    return text + (f" | removed {_listed(record['removed'])}" if record["removed"] else "")


def describe_startup(record: Record) -> str:
    """As `14.2 s: config 0.9, import 6.1, ...`."""
    names = [key.removesuffix("-seconds") for key in record if key.endswith("-seconds")]
    parts = [f"{name.replace('-', ' ')} {record[f'{name}-seconds']:.1f}" for name in names]
    return f"{record['seconds']:.1f} s: {', '.join(parts)}"


def _profile(record: Record) -> str:
    text = f"profiled the last {record['steps']} steps of {_ranks(record)} into {record['directory']}"
    return f"{text}\n{record['largest costs']}"


def _no_loss(record: Record) -> str:
    of = "the validation samples" if record["of"] == "validation" else "the iterations since the last record"
    return f"no loss for {' '.join([of, _listed(record['sets'])]).strip()}: all their tokens are masked"


def _hang_title(record: Record) -> str:
    return f"Run hangs: {_ranks(record)}"


def _hang(record: Record) -> str:
    return f"{_ranks(record)} on {record['host']} hangs: {record['kind']} in {record['phase']}"


def _fallback(record: Record) -> str:
    text = f"layer {record['layer']} runs in {record['runs in']} from now on"
    if record["runs in"] == "bf16":
        text += f": {record['tensor']} {record['quantity']} {record['value']:.3g} > {record['limit']:.3g}"
    return text


def _rewind(record: Record) -> str:
    text = f"rolled back from iteration {record['from-iteration']} to {record['iteration']} ({record['checkpoint']}): "
    text += f"{record['reason']}; skipping samples {record['first skipped sample']} to "
    text += f"{record['last skipped sample']}; {record['rewinds left']} rollbacks left"
    return " | ".join([text, *record["notes"]])


def _replica(record: Record) -> str:
    text = f"{record['tensors']} tensors differ between replicas, the first is {record['first tensor']}"
    text += f"; suspects: {_ranks(record)} on {_listed(record['hosts'])}"
    return text + (f"; they agreed at iteration {record['last alike']}" if record["last alike"] is not None else "")


def _end(record: Record) -> str:
    stopped = record.get("stopped")
    text = f"{'finished' if stopped is None else 'stopped after'} {record['iteration']} iterations"
    text += f" in {format_seconds(float(record['seconds'] or 0.0))}"
    if stopped is not None:
        text += f" because of {stopped} (continue with --resume)"
    first, last = record["lm loss validation at start"], record["lm loss validation"]
    if isinstance(first, float) and isinstance(last, float):
        text += f" | lm loss validation {first:.4f} -> {last:.4f} ({last - first:+.4f} nats)"
    elif isinstance(first, float):
        text += f" | lm loss validation {first:.4f} at the start"
    return text


EVENTS: Mapping[str, EventKind] = {
    "start": EventKind(text=_start),
    "ready": EventKind(text="first step after {seconds-to-first-step:.1f} s"),
    "startup": EventKind(text=lambda record: f"startup took {describe_startup(record)}", says_iteration=True),
    "resume": EventKind(text=_resume, says_iteration=True),
    "checkpoint": EventKind(text=_checkpoint, says_iteration=True),
    "profile": EventKind(text=_profile),
    "end": EventKind(text=_end, says_iteration=True),
    "fp8-fallback": EventKind(Level.WARNING, "FP8 fallback: layer {layer}", _fallback),
    "spike": EventKind(Level.WARNING, "Loss spike", "loss spike: {reason}"),
    "no-loss": EventKind(text=_no_loss),
    "skip": EventKind(
        Level.WARNING,
        "NaN or infinity: step skipped",
        "step skipped ({skips in a row} in a row, {skips} in total): {reason}",
    ),
    "rewind": EventKind(Level.WARNING, "Run rolled back", _rewind),
    "slow-rank": EventKind(
        Level.WARNING,
        "Straggler: rank {rank}",
        "rank {rank} on {host} is a straggler: {work} takes {seconds:.3g} s, {factor:.3g} times the median",
    ),
    "hang": EventKind(Level.ERROR, _hang_title, _hang),
    "replica": EventKind(Level.ERROR, "Replicas differ", _replica),
    "failure": EventKind(Level.ERROR, "Run failed: {kind}", "failed: {kind}: {error}"),
}


def event_level(record: Record) -> Level:
    """The level of a record; measurements and unknown events are information."""
    return _kind(record).level


def event_title(record: Record) -> str:
    """The title of an alert."""
    return _formatted(_kind(record).title, record) or str(record["event"])


def event_text(record: Record) -> str:
    """The text of an event, without its iteration."""
    text = _kind(record).text
    formatted = None if text is None else _formatted(text, record)
    return formatted or " | ".join([str(record["event"]), *all_values(record)])


def event_line(record: Record) -> str:
    """The text of an event as a console line, with its iteration if it has one."""
    iteration = record.get("iteration")
    if iteration is None or _kind(record).says_iteration:
        return event_text(record)
    return f"iteration {iteration} | {event_text(record)}"


def all_values(record: Record) -> list[str]:
    """`key value` for every key but event, time and iteration."""
    return [f"{key} {value}" for key, value in record.items() if key not in ("event", "time", "iteration")]


def _kind(record: Record) -> EventKind:
    return EVENTS.get(str(record["event"]), EventKind())


def _formatted(text: str | Callable[[Record], str], record: Record) -> str | None:
    """The formatted text; None if the record, of another version, lacks a key."""
    try:
        return text.format_map(record) if isinstance(text, str) else text(record)
    except (KeyError, TypeError, ValueError):
        return None


def format_seconds(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def short_count(number: float) -> str:
    """Three digits of a count: `950`, `12.3k`, `1.24M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + letter
    return f"{number:.0f}"


class Alerts:
    """Which events to alert of: each once, and none of before `since`, a Unix time in seconds."""

    def __init__(self, since: float) -> None:
        # Records have milliseconds.
        self._since = math.floor(since * 1000) / 1000 if math.isfinite(since) else since
        self._sent: set[tuple[object, ...]] = set()

    def is_new(self, record: Record) -> bool:
        """Whether this is the first time that it is asked about an event since then."""
        seconds = float(record.get("time") or 0.0)
        event = record["event"], record.get("iteration"), seconds
        if seconds < self._since or event in self._sent:
            return False
        self._sent.add(event)
        return True
