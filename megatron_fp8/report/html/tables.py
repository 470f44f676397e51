"""Tables of a report: final numbers, time per step, events, environment, precision chart, config.

Cells are text, not yet escaped. Must not know how tables look.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fp8.report.events import describe_startup, event_level, event_text, format_seconds
from megatron_fp8.report.html.figures import series_scale, short, time_parts
from megatron_fp8.report.record import Record
from megatron_fp8.report.run_reader import Run, flatten
from megatron_fp8.report.series_registry import LOSS, PERPLEXITY, STEP_TIME, VALIDATION

_NONE = "-"
_YEAR_3000 = 32503680000
_CHART = "precision chart"
_COSTS = "largest costs"
_NOT_TEXT = ("event", "time", _CHART)


@dataclass(frozen=True)
class Row:
    """A row with one cell per run."""

    name: str
    cells: list[str]

    @property
    def differs(self) -> bool:
        """Whether the runs' cells differ."""
        return len(set(self.cells)) > 1


def state(run: Run) -> str:
    """How far the run got, and what stopped it."""
    total = run.config.get("training.train_iters")
    done = f"{run.iteration:,}" + (f" of {total:,}" if isinstance(total, int) else "") + " iterations"
    if run.end is None:
        failed = next((event for event in reversed(run.events) if event["event"] == "failure"), None)
        if failed is not None and run.events[-1] is failed:
            return f"failed after {done}: {failed.get('kind')}: {failed.get('error')}"
        return f"{done} recorded, no end: still running, or killed"
    stopped = run.end.get("stopped")
    return f"finished {done}" if stopped is None else f"stopped after {done} because of {stopped}"


def numbers(runs: Sequence[Run]) -> list[Row]:
    """Final numbers, with units; without rows that no run has."""
    rows = [Row("State", [state(run) for run in runs])]
    names = dict.fromkeys(name for run in runs for name in run.curves)
    sets = [name for name in names if name.startswith(f"{VALIDATION}/")]
    rows.append(Row("Last training loss, nats per token", [_last(run, LOSS) for run in runs]))
    for name in [VALIDATION, *(sets if len(sets) > 1 else [])]:
        label = "Validation loss" + name.removeprefix(VALIDATION).replace("/", ", ")
        rows.append(Row(f"{label}, last (best), nats per token", [_last_and_best(run, name) for run in runs]))
    rows += [
        Row("Validation perplexity per token", [_last(run, PERPLEXITY) for run in runs]),
        Row("Training tokens", [_last(run, "consumed-tokens", "{:,.0f}") for run in runs]),
        Row("Throughput, mean, tokens/s", [_mean(run, "tokens-per-second") for run in runs]),
        Row("Model FLOPs per GPU, mean, TFLOP/s", [_mean(run, "throughput") for run in runs]),
        Row("Model FLOPs utilization, mean", [_mean(run, "mfu", "{:.1%}") for run in runs]),
        Row("Time per step, mean, s", [_mean(run, STEP_TIME) for run in runs]),
        Row("Waiting for data, mean share of a step", [_mean(run, "data-wait-share", "{:.2%}") for run in runs]),
        Row("Pauses for evaluation and checkpoints, s", [_sum(run, "pause-seconds") for run in runs]),
        Row("Pipeline bubble with equally fast stages", [_last(run, "pipeline-bubble", "{:.1%}") for run in runs]),
        Row("Peak memory, GB (1e9 bytes)", [_peak_memory(run) for run in runs]),
        Row("Skipped steps", [_last(run, "skipped-iterations", "{:,.0f}") for run in runs]),
        Row("Last startup", [describe_startup(run.startup) if run.startup else _NONE for run in runs]),
        Row("Total time of the last job", [_seconds(run) for run in runs]),
    ]
    return [row for row in rows if any(cell != _NONE for cell in row.cells)]


@dataclass(frozen=True)
class Part:
    """A part of a step's time: mean seconds, and their share."""

    name: str
    seconds: float
    share: float


def time_split(run: Run) -> list[Part]:
    """Parts of a mean step, the rest last; empty if the record has no parts."""
    total = run.curves.get(STEP_TIME)
    if total is None or not total.mean:
        return []
    whole = total.mean
    seconds = {name: run.curves[name].mean or 0.0 for name in time_parts(run.curves)}
    waits = run.curves.get("data-wait-share")
    if not seconds and waits is not None and waits.mean is not None:
        seconds = {"waiting for data": waits.mean * whole}
    if not seconds:
        return []
    rest = whole - sum(seconds.values())
    parts = [Part(name, value, value / whole) for name, value in seconds.items()]
    # The parts of current records add up, except for rounding.
    return [*parts, Part("everything else", rest, rest / whole)] if rest > 1e-6 * whole else parts


def _last(run: Run, name: str, form: str = "") -> str:
    curve = run.curves.get(name)
    return _text(None if curve is None else curve.last, form)


def _mean(run: Run, name: str, form: str = "") -> str:
    curve = run.curves.get(name)
    return _text(None if curve is None else curve.mean, form)


def _sum(run: Run, name: str) -> str:
    curve = run.curves.get(name)
    return _text(None if curve is None or curve.mean is None else curve.mean * (curve.count - curve.not_finite))


def _peak_memory(run: Run) -> str:
    """Of the rank that needs most, if recorded; else of rank 0."""
    name = "peak-memory-bytes"
    curve = run.curves.get(f"{name}/largest", run.curves.get(name))
    return _text(None if curve is None or curve.largest is None else curve.largest * series_scale(name))


def _last_and_best(run: Run, name: str) -> str:
    curve = run.curves.get(name)
    if curve is None or curve.last is None or curve.smallest is None:
        return _NONE
    return f"{curve.last:.4f} ({curve.smallest:.4f})"


def _text(value: float | None, form: str = "") -> str:
    if value is None:
        return _NONE
    return form.format(value) if form else short(value)


def _seconds(run: Run) -> str:
    seconds = run.end.get("seconds") if run.end is not None else None
    return format_seconds(seconds) if isinstance(seconds, int | float) else _NONE


def environment(runs: Sequence[Run]) -> list[Row]:
    """The `start` record without the precision chart."""
    starts = [flatten({key: value for key, value in run.start.items() if key not in _NOT_TEXT}) for run in runs]
    keys = dict.fromkeys(key for start in starts for key in start)
    return [Row(key, [_config_value(start, key) for start in starts]) for key in keys]


@dataclass(frozen=True)
class Event:
    """An event as text. `iteration`, `time` (UTC): empty if the record has none. `level`: info, warning or error."""

    iteration: str
    time: str
    kind: str
    level: str
    text: str


def events(run: Run) -> list[Event]:
    """The events, in the order of the record."""
    return [
        Event(
            str(event.get("iteration", "")),
            _utc(event.get("time")),
            event["event"],
            event_level(event).name.lower(),
            _event_text(event),
        )
        for event in run.events
    ]


def _utc(seconds: object) -> str:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < _YEAR_3000:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def events_left_out(run: Run) -> int:
    """Number of events between the first and the last ones that are not listed."""
    return run.num_events - len(run.events)


def _event_text(event: Record) -> str:
    if event["event"] == "start":
        # The rest of it is the section on the environment.
        return str(event.get("device", ""))
    if event["event"] == "profile":
        event = {**event, _COSTS: ""}
    return event_text(event).strip()


def profiles(run: Run) -> list[tuple[str, str]]:
    """Titles and texts of the most expensive operations of profiled steps."""
    return [
        (f"Up to iteration {event.get('iteration')}, rank {event['ranks'][0]}", str(event[_COSTS]))
        for event in run.events
        if event["event"] == "profile" and event.get(_COSTS) and event.get("ranks")
    ]


def chart(run: Run) -> list[tuple[str, list[dict[str, Any]]]]:
    """The precision chart's rows by section."""
    rows = run.start.get(_CHART)
    by_section = itertools.groupby(rows if isinstance(rows, list) else [], key=lambda row: row["section_label"])
    return [(section, list(members)) for section, members in by_section]


def config(runs: Sequence[Run]) -> list[Row]:
    """Every config key with its values."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [Row(key, [_config_value(run.config, key) for run in runs]) for key in keys]


def _config_value(values: dict[str, Any], key: str) -> str:
    if key not in values:
        return _NONE
    value = values[key]
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
