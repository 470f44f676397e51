"""Every event is told by its words on the console, in the report, and, from a warning on, as an alert."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_fp8.report.console import ConsoleSink, format_record
from megatron_fp8.report.events import EVENTS, Level, event_level, event_line, event_text, event_title
from megatron_fp8.report.html.tables import events
from megatron_fp8.report.record import METRICS, JsonLines
from megatron_fp8.report.run_reader import read_run

LOSSES = {"lm loss validation at start": 8.5, "lm loss validation": 6.0}
CHECKPOINT = {"path": "c/iter_0000008", "bytes": 16.4e6, "seconds": 2.5, "hold-up-seconds": 0.1}
RESUME = {"checkpoint": "c/iter_0000008", "iteration": 8}
TOLD: list[tuple[dict[str, Any], str]] = [
    ({"event": "start", "device": "cpu", "arithmetic": "native", "time": 5.0}, "device: cpu\narithmetic: native"),
    ({"event": "ready", "seconds-to-first-step": 3.25}, "first step after 3.2 s"),
    (
        {"event": "startup", "iteration": 9, "seconds": 9.81, "import-seconds": 6.2, "first-step-seconds": 3.61},
        "startup took 9.8 s: import 6.2, first step 3.6",
    ),
    (
        {"event": "resume", **RESUME, "weights only": False, "notes": []},
        "resumed from c/iter_0000008 at iteration 8",
    ),
    (
        {"event": "resume", **RESUME, "weights only": True, "notes": ["new data", "new lr"]},
        "resumed from c/iter_0000008 at iteration 8, weights only | new data | new lr",
    ),
    (
        {"event": "checkpoint", "iteration": 8, **CHECKPOINT, "removed": [4]},
        "checkpoint c/iter_0000008 | 16.4 MB in 2.5 s, training waited 0.10 s | removed 4",
    ),
    (
        {"event": "checkpoint", "iteration": 8, **CHECKPOINT, "removed": []},
        "checkpoint c/iter_0000008 | 16.4 MB in 2.5 s, training waited 0.10 s",
    ),
    (
        {"event": "fp8-fallback", "iteration": 9, "layer": 3, "runs in": "bf16"}
        | {"tensor": "t", "quantity": "clipped", "value": 0.25, "limit": 0.001},
        "iteration 9 | layer 3 runs in bf16 from now on: t clipped 0.25 > 0.001",
    ),
    (
        {"event": "fp8-fallback", "iteration": 9, "layer": 3, "runs in": "fp8"},
        "iteration 9 | layer 3 runs in fp8 from now on",
    ),
    (
        {"event": "profile", "iteration": 12, "steps": 2, "ranks": [0, 1], "directory": "p", "largest costs": "op\nmm"},
        "iteration 12 | profiled the last 2 steps of ranks 0, 1 into p\nop\nmm",
    ),
    (
        {"event": "end", "iteration": 40, "seconds": 81.0, "stopped": None, **LOSSES},
        "finished 40 iterations in 1 min 21 s | lm loss validation 8.5000 -> 6.0000 (-2.5000 nats)",
    ),
    (
        {"event": "end", "iteration": 8, "seconds": 61.0, "stopped": "signal SIGTERM", **LOSSES}
        | {"lm loss validation": None},
        "stopped after 8 iterations in 1 min 01 s because of signal SIGTERM (continue with --resume)"
        " | lm loss validation 8.5000 at the start",
    ),
    (
        {"event": "end", "iteration": 8, "seconds": 61.0, "stopped": "signal SIGTERM"} | dict.fromkeys(LOSSES),
        "stopped after 8 iterations in 1 min 01 s because of signal SIGTERM (continue with --resume)",
    ),
    (
        {"event": "failure", "kind": "NonFiniteError", "error": "grad-norm is {nan}", "time": 1.0},
        "failed: NonFiniteError: grad-norm is {nan}",
    ),
    # Kinds without words of their own, of this version or another, keep nothing to themselves.
    ({"event": "spike", "iteration": 7, "lm loss": 9.5, "time": 1.0}, "iteration 7 | spike | lm loss 9.5"),
    ({"event": "spike", "iteration": 7, "reason": "9.5 > 4"}, "iteration 7 | loss spike: 9.5 > 4"),
    (
        {"event": "skip", "iteration": 7, "skips in a row": 1, "skips": 3, "reason": "lm loss is nan"},
        "iteration 7 | step skipped (1 in a row, 3 in total): lm loss is nan",
    ),
    (
        {"event": "rewind", "iteration": 4, "from-iteration": 9, "reason": "9.5 > 4", "checkpoint": "c/iter_0000004"}
        | {"first skipped sample": 16, "last skipped sample": 35, "rewinds": 1, "rewinds left": 2, "notes": ["worn"]},
        "iteration 4 | rolled back from iteration 9 to 4 (c/iter_0000004): 9.5 > 4; skipping samples 16 to"
        " 35; 2 rollbacks left | worn",
    ),
    (
        {"event": "slow-rank", "iteration": 7, "rank": 3, "host": "b", "work": "compute", "seconds": 0.51234}
        | {"median seconds": 0.2, "factor": 2.5617},
        "iteration 7 | rank 3 on b is a straggler: compute takes 0.512 s, 2.56 times the median",
    ),
    (
        {"event": "hang", "iteration": 7, "ranks": [3], "host": "b", "phase": "optimizer", "kind": "stuck"},
        "iteration 7 | rank 3 on b hangs: stuck in optimizer",
    ),
    (
        {"event": "replica", "iteration": 7, "tensors": 2, "first tensor": "w", "ranks": [1, 2], "hosts": ["b"]}
        | {"last alike": None},
        "iteration 7 | 2 tensors differ between replicas, the first is w; suspects: ranks 1, 2 on b",
    ),
    (
        {"event": "no-loss", "iteration": 7, "of": "training", "sets": []},
        "iteration 7 | no loss for the iterations since the last record: all their tokens are masked",
    ),
    (
        {"event": "no-loss", "iteration": 0, "of": "validation", "sets": ["code", "web"]},
        "iteration 0 | no loss for the validation samples code, web: all their tokens are masked",
    ),
    ({"event": "moon", "phase": "full", "time": 1.0}, "moon | phase full"),
    ({"event": "checkpoint", "iteration": 8, "path": "c"}, "checkpoint | path c"),
    ({"event": "ready", "seconds-to-first-step": "soon"}, "ready | seconds-to-first-step soon"),
]


@pytest.mark.parametrize(("record", "line"), TOLD)
def test_an_event_is_told_in_words(record: dict[str, Any], line: str) -> None:
    assert event_line(record) == line
    assert format_record(record, 100) == line
    assert line.endswith(event_text(record))


def test_every_kind_with_words_was_told_above() -> None:
    assert {kind for kind, told in EVENTS.items() if told.text} <= {record["event"] for record, _ in TOLD}


def test_who_is_alerted_reads_what_it_is_about_in_the_title() -> None:
    alerting = {kind for kind, told in EVENTS.items() if told.level > Level.INFO}
    assert alerting >= {"fp8-fallback", "spike", "skip", "rewind", "slow-rank", "hang", "replica", "failure"}
    assert all(EVENTS[kind].title for kind in alerting)
    assert event_title({"event": "failure", "kind": "NonFiniteError"}) == "Run failed: NonFiniteError"
    assert event_title({"event": "fp8-fallback", "layer": 3}) == "FP8 fallback: layer 3"
    assert event_title({"event": "failure"}) == "failure"
    assert event_level({"event": "train"}) == event_level({"event": "moon"}) == Level.INFO


def test_quiet_says_warnings_and_errors_alone_and_logs_everything(tmp_path: Path) -> None:
    output = io.StringIO()
    sink = ConsoleSink(tmp_path / "console.log", 100, quiet=True, console=Console(file=output, soft_wrap=True))
    for record, _ in TOLD:
        sink.write(record)
    sink.close()
    loud = [line for record, line in TOLD if event_level(record) > Level.INFO]
    assert output.getvalue().splitlines() == loud
    assert len(loud) == 10
    log = (tmp_path / "console.log").read_text()
    assert all(line in log for _, line in TOLD)


def test_the_report_lists_every_event_with_its_level(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / METRICS)
    for record, _ in TOLD[1:]:
        sink.write(record)
    sink.close()
    listed = events(read_run(tmp_path))
    assert [(event.kind, event.text, event.level) for event in listed] == [
        # A trace's costs have a section of their own.
        (record["event"], event_text(record).partition("\n")[0], event_level(record).name.lower())
        for record, _ in TOLD[1:]
    ]
