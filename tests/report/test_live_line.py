"""What a terminal shows of a run: one line with the newest numbers, which nothing breaks and which erases nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from terminal import Screen, run_on_terminal

from megatron_fp8.report.events import short_count

ROOT = Path(__file__).parents[2]
TRAIN: dict[str, Any] = {
    "event": "train",
    "lm loss": 3.25,
    "grad-norm": 1.0,
    "learning-rate": 1e-3,
    "tokens-per-second": 12345.0,
    "mfu": 0.414,
    "seconds-left": 11220.0,
}
VALIDATION = {"event": "validation", "iteration": 0, "lm loss validation": 3.5}
CHECK = {
    "event": "fp8-check",
    "iteration": 1,
    "fallen-back-layers": [0, 1],
    "fp8/layers.0/a/input/clipped": 0.001,
    "fp8/layers.2/a/input/clipped": 0.0125,
    "fp8/layers.2/a/weight/flushed": 0.02,
    "fp8/layers.2/b/weight/flushed": "nan",
}
RETURN = {"event": "fp8-fallback", "iteration": 1, "layer": 1, "runs in": "fp8"}
END = {
    "event": "end",
    "iteration": 3,
    "seconds": 9.0,
    "stopped": None,
    "lm loss validation at start": 3.5,
    "lm loss validation": None,
}
PROGRAM = """
import os, sys, warnings
from pathlib import Path
from megatron_fp8.report.console import ConsoleSink
sink = ConsoleSink(Path("console.log"), 3)
"""


def write(record: dict[str, Any]) -> str:
    return f"sink.write({record!r})\n"


def show(program: str, directory: Path, width: int, **more: Any) -> tuple[int, Screen]:
    """Run a program that has a console sink of 3 steps."""
    environment = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    return run_on_terminal([sys.executable, "-c", PROGRAM + program], directory, width, environment, **more)


def shown(screen: Screen) -> list[str]:
    return [line.rstrip() for line in screen.lines if line.strip()]


def test_one_line_has_the_newest_numbers_and_other_lines_scroll_above_it(tmp_path: Path) -> None:
    steps = [write({**TRAIN, "iteration": step, "lm loss": 3.25 - step}) for step in (1, 2, 3)]
    program = write(VALIDATION) + write(CHECK) + write(RETURN) + "".join(steps) + write(END) + "sink.close()"
    code, screen = show(program, tmp_path, 160)
    assert code == 0
    assert shown(screen) == [
        "iteration 0/3 | lm loss validation 3.5000",
        "iteration 1 | layer 1 runs in fp8 from now on",
        "finished 3 iterations in 9 s | lm loss validation 3.5000 at the start | .",
    ]
    numbers = (
        "loss {loss}  val 3.5000  12.3k tok/s  MFU 41%  3 h 07 min left  fp8 clip 1.2% flush 2%  1 fell back  1 warning"
    )
    drawn = [line.strip() for line in screen.last_lines]
    for step, loss in ((1, "2.2500"), (2, "1.2500"), (3, "0.2500")):
        assert any(line.endswith(f"{step}/3  {numbers.format(loss=loss)}") for line in drawn), drawn
    assert screen.cursor_visible
    log = (tmp_path / "console.log").read_text().splitlines()
    assert len(log) == 6
    assert log[2].startswith("iteration 1/3 | lm loss 2.2500 | grad-norm 1.000")


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (100, "1/3  loss 3.2500  12.3k tok/s  3 h 07 min left  fp8 clip 1.2% flush 2%  1 fell back  1 warning"),
        (80, "1/3  loss 3.2500  12.3k tok/s  MFU 41%  3 h 07 min left  1 fell back  1 warning"),
        (40, "1/3  loss 3.2500  3 h 07 min left"),
        (12, "1/3"),
    ],
)
def test_a_narrow_terminal_shows_what_matters_most_in_one_line(width: int, line: str, tmp_path: Path) -> None:
    program = write(CHECK) + write(RETURN) + write({**TRAIN, "iteration": 1}) + "sink.close()"
    code, screen = show(program, tmp_path, width)
    assert code == 0
    assert any(drawn.strip().endswith(line) for drawn in screen.last_lines), screen.last_lines
    live = [drawn for drawn in screen.last_lines if "1/3" in drawn]
    assert live
    assert all(len(drawn) < width for drawn in live)


def test_what_others_write_to_the_terminal_stays_there(tmp_path: Path) -> None:
    """Libraries below Python, other ranks and launchers do not ask; warnings and prints of this process do."""
    program = write({**TRAIN, "iteration": 1}) + (
        "os.write(2, b'[rank1] NCCL WARN one\\r\\n[rank1] NCCL WARN two\\r\\n')\n"
        "warnings.warn('this is deprecated')\nprint('plain')\n"
    )
    code, screen = show(program + write({**TRAIN, "iteration": 2}) + "sink.close()", tmp_path, 120)
    assert code == 0
    text = "\n".join(shown(screen))
    for part in ("NCCL WARN one", "\n[rank1] NCCL WARN two", "UserWarning: this is deprecated", "\nplain"):
        assert part in text, text
    assert "2/3" not in text


def test_an_error_ends_below_the_line_and_a_killed_run_leaves_the_cursor(tmp_path: Path) -> None:
    program = write({**TRAIN, "iteration": 1}) + "try:\n    1 / 0\nfinally:\n    sink.close()\n"
    code, screen = show(program, tmp_path, 100)
    assert code == 1
    assert shown(screen)[0] == "Traceback (most recent call last):"
    assert shown(screen)[-1] == "ZeroDivisionError: division by zero"
    code, screen = show(write({**TRAIN, "iteration": 1}) + "os.kill(os.getpid(), 9)", tmp_path, 100)
    assert code == -9
    assert screen.cursor_visible
    assert "1/3  loss 3.2500" in shown(screen)[0]


def test_errors_that_go_to_a_file_stay_out_of_the_terminal(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w") as stderr:
        program = write({**TRAIN, "iteration": 1}) + "warnings.warn('deprecated')\nsink.close()"
        code, screen = show(program, tmp_path, 100, stderr=stderr.fileno())
    assert code == 0
    assert shown(screen) == []
    assert "UserWarning: deprecated" in (tmp_path / "stderr").read_text()


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TERM"])
def test_where_lines_cannot_move_they_are_plain(name: str, tmp_path: Path) -> None:
    program = write({**TRAIN, "iteration": 1}) + "sink.close()"
    line = "iteration 1/3 | lm loss 3.2500 | grad-norm 1.000 | learning-rate 1.00e-03 | tokens/s 12,345"
    line += " | time left 3 h 07 min\n"
    if name == "TERM":
        environment = {"PYTHONPATH": str(ROOT), "TERM": "dumb"}
        _, screen = run_on_terminal([sys.executable, "-c", PROGRAM + program], tmp_path, 60, environment)
        # It is the terminal that wraps: at its width, not between words.
        assert shown(screen) == [line[:60], line[60:].strip()]
    else:
        import subprocess

        environment = {"PYTHONPATH": str(ROOT), "FORCE_COLOR": "1"}
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM + program], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert (ended.stdout, ended.stderr) == (line, "")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (949.6, "950"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (12345, "12.3k"),
        (123456, "123k"),
        (1.236e6, "1.24M"),
        (999_600, "1.00M"),
        (2.5e9, "2.50G"),
    ],
)
def test_counts_have_three_digits(count: float, text: str) -> None:
    assert short_count(count) == text
