"""The record of a run and its lines on the console."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron_fp8.report.console import ConsoleSink, format_record
from megatron_fp8.report.events import format_seconds
from megatron_fp8.report.record import (
    BrokenLines,
    JsonLines,
    Recorder,
    drop_records_after,
    read_records,
)

TRAIN = {
    "iteration": 5,
    "lm loss": 8.13084,
    "grad-norm": 1.4,
    "learning-rate": 1.2e-3,
    "tokens-per-second": 1982.4,
    "seconds-left": 72.0,
}


def test_lines_are_json_also_where_json_has_no_number(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    recorder = Recorder([sink])
    recorder.write("train", {"iteration": 1, "lm loss": float("nan"), "grad-norm": float("inf")})
    recorder.write("train", {"iteration": 2, "lm loss": 1.5})
    # Before it is closed: a killed run leaves whole lines.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0].pop("time") <= lines[1]["time"]
    assert lines[0] == {"event": "train", "iteration": 1, "lm loss": "nan", "grad-norm": "inf"}
    assert lines[1]["lm loss"] == 1.5
    recorder.close()


def test_a_run_that_waits_for_data_says_so() -> None:
    assert "waits for data 12% | time left" in format_record({"event": "train", **TRAIN, "data-wait-share": 0.123}, 40)
    assert "waits" not in format_record({"event": "train", **TRAIN, "data-wait-share": 0.009}, 40)


def test_a_recorder_without_sinks_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder([])
    recorder.write("train", TRAIN)
    recorder.close()
    assert capfd.readouterr() == ("", "")


def test_console_and_log_say_the_same(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, width=40, soft_wrap=True)
    sink = ConsoleSink(tmp_path / "console.log", 40, console=console)
    sink.write({"event": "train", **TRAIN})
    sink.write({"event": "validation", "iteration": 5, "lm loss validation": 8.0})
    sink.write(
        {
            "event": "end",
            "iteration": 40,
            "seconds": 81.0,
            "lm loss validation at start": 8.3728,
            "lm loss validation": 6.1795,
        }
    )
    sink.close()
    lines = (tmp_path / "console.log").read_text().splitlines()
    assert lines == [
        "iteration  5/40 | lm loss 8.1308 | grad-norm 1.400 | learning-rate 1.20e-03 | tokens/s 1,982"
        " | time left 1 min 12 s",
        "iteration 5/40 | lm loss validation 8.0000",
        f"finished 40 iterations in 1 min 21 s | lm loss validation 8.3728 -> 6.1795 (-2.1933 nats) | {tmp_path}",
    ]
    assert output.getvalue().splitlines() == lines


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"), (7620, "2 h 07 min"), (273600, "3 d 04 h")],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_run_that_goes_on_drops_what_it_will_record_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    kept = [{"event": "start"}, {"event": "train", "iteration": 5}, {"event": "checkpoint", "iteration": 5}]
    dropped = [
        {"event": "train", "iteration": 6},
        {"event": "validation", "iteration": 6},
        {"event": "end", "iteration": 5},
    ]
    for record in [*kept[:1], *dropped[:1], *kept[1:], *dropped[1:]]:
        sink.write(record)
    sink.close()
    with path.open("a", encoding="utf-8") as file:
        file.write('{"event": "train", "itera')
    drop_records_after(path, 5)
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == kept
    drop_records_after(tmp_path / "none.jsonl", 5)
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            {
                "iteration": 8,
                "path": "c/iter_0000008",
                "bytes": 16.4e6,
                "seconds": 2.5,
                "hold-up-seconds": 0.1,
                "removed": [4],
            },
            "checkpoint c/iter_0000008 | 16.4 MB in 2.5 s, training waited 0.10 s | removed 4",
        ),
    ],
)
def test_a_checkpoint_is_told_in_a_line(record: dict, line: str) -> None:
    assert format_record({"event": "checkpoint", **record}, 100) == line


def test_a_stopped_run_says_why_and_how_to_go_on() -> None:
    record = {"event": "end", "iteration": 8, "seconds": 61.0, "stopped": "signal SIGTERM"}
    losses = {"lm loss validation at start": None, "lm loss validation": None}
    line = format_record({**record, **losses}, 100)
    assert line == "stopped after 8 iterations in 1 min 01 s because of signal SIGTERM (continue with --resume)"


BROKEN = [b"{", b"[1]", b"{}", b'{"event": 5}', b'{"event": "train", "iteration": "5"}', b"\xff\xfe", b"\0\0", b""]


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_told_by_its_number_and_stays_in_the_file(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = b'{"event": "train", "iteration": 1}\n'
    # The last line is being written, or was when its run was killed.
    path.write_bytes(whole + line + b"\n" + whole + line)
    record = {"event": "train", "iteration": 1}
    broken = BrokenLines()
    assert list(read_records(path, broken)) == [record, record]
    assert (broken.count, broken.first) == (1, [2])
    drop_records_after(path, 0)
    assert path.read_bytes() == line + b"\n"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([1234], "line 1,234 of metrics.jsonl is not a record and was skipped"),
        ([3, 5], "2 lines of metrics.jsonl are not records and were skipped: 3, 5"),
        (
            range(1, 13),
            "12 lines of metrics.jsonl are not records and were skipped: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...",
        ),
    ],
)
def test_broken_lines_are_said_in_a_sentence(numbers: list[int], text: str) -> None:
    broken = BrokenLines()
    for number in numbers:
        broken.add(number)
    assert str(broken) == text
