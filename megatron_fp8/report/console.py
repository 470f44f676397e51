"""Shows a run in a terminal: one live line and events above it; in a pipe or file, a plain line for each record.

The plain lines also go to the run directory's `console.log`. Imports no torch.

A live line, not a table: other ranks, launchers and libraries write to the same terminal without asking. What they
write ends up behind or below a single line; redrawing several lines would erase it. Nothing is drawn between records,
and the cursor stays visible, so that a killed run leaves the terminal as it was.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_fp8.report.events import MEASUREMENTS, Level, event_level, event_line
from megatron_fp8.report.record import Record
from megatron_fp8.report.series_registry import line_columns, named_values

# Numbers of single tensors are for files and dashboards.
_NO_LINE = MEASUREMENTS - {"train", "validation"}
_STYLES = {Level.INFO: "", Level.WARNING: "yellow", Level.ERROR: "bold red"}
_GAP = "  "
_MIN_BAR, _MAX_BAR = 8, 30


class ConsoleSink:
    """Writes every record's line to `log_path`, and shows on the console what belongs there.

    On a terminal that is one live line with the newest numbers, and above it whatever else happens; in a pipe or a file
    every line. `quiet`: warnings and errors only. `iteration`: where a run resumes.
    """

    def __init__(
        self,
        log_path: Path,
        train_iters: int,
        iteration: int = 0,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._log = log_path.open("a", encoding="utf-8", buffering=1)
        self._train_iters = train_iters
        self._run_directory = log_path.parent
        self._quiet = quiet
        # Colors may be forced where there is no terminal; a moving line may not.
        live = not quiet and self._console.is_interactive and self._console.file.isatty()
        self._live_line = LiveLine(self._console, train_iters, iteration) if live else None

    def write(self, record: Record) -> None:
        """Log a record's line and show it, or update the live line with its numbers."""
        if record["event"] not in _NO_LINE:
            line = format_record(record, self._train_iters)
            if record["event"] == "end":
                line += f" | {self._run_directory}"
            self._log.write(line + "\n")
            self._show(record, line)
        if self._live_line is not None:
            self._live_line.update(record)

    def close(self) -> None:
        """Remove the live line and close the log."""
        if self._live_line is not None:
            self._live_line.close()
        self._log.close()

    def _show(self, record: Record, line: str) -> None:
        level = event_level(record)
        if self._live_line is not None:
            if record["event"] != "train":
                self._console.print(line, markup=False, style=_STYLES[level])
        elif not self._quiet or level > Level.INFO:
            self._console.print(line, markup=False)


def format_record(record: Record, train_iters: int) -> str:
    """A record as one line: `name value | name value | ...`."""
    if record["event"] not in ("train", "validation"):
        return event_line(record)
    width = len(str(train_iters)) if record["event"] == "train" else 0
    parts = [text for _, text in line_columns(dict(named_values(record)), "console")]
    return " | ".join([f"iteration {record['iteration']:>{width}}/{train_iters}", *parts])


@dataclass(frozen=True)
class _Part:
    """A part of the line; those of most `worth` are kept where the terminal is narrow."""

    text: str
    worth: int
    style: str = ""


class LiveLine:
    """The line of a run of `train_iters` steps that starts after `iteration`."""

    def __init__(self, console: Console, train_iters: int, iteration: int) -> None:
        self._console = console
        self._train_iters = train_iters
        self._iteration = iteration
        self._numbers: dict[str, Any] = {}
        self._has_trained = False
        self._worst = ""
        self._in_bf16: set[int] = set()
        self._counts = {Level.WARNING: 0, Level.ERROR: 0}
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            # What goes elsewhere than to the terminal stays as it is.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        console.show_cursor(True)
        self._draw()

    def update(self, record: Record) -> None:
        """Take over the numbers of a record and redraw the line."""
        event = record["event"]
        if event == "train":
            self._iteration = record["iteration"]
            self._has_trained = True
        elif event == "fp8-check":
            clipped, flushed = (100 * _largest(record, quantity) for quantity in ("clipped", "flushed"))
            self._worst = f"clip {clipped:.2g}% flush {flushed:.2g}%"
            self._in_bf16 = set(record["fallen-back-layers"])
        elif event == "fp8-fallback":
            change = self._in_bf16.add if record["runs in"] == "bf16" else self._in_bf16.discard
            change(record["layer"])
        if event in ("train", "validation"):
            self._numbers.update(named_values(record))
        level = event_level(record)
        if level in self._counts:
            self._counts[level] += 1
        self._draw()

    def close(self) -> None:
        """Remove the line."""
        self._live.stop()

    def _draw(self) -> None:
        # Some terminals wrap a line as wide as they are.
        width = self._console.width - 1
        parts = _fitting(self._parts(), width)
        left = width - _width(parts) - len(_GAP)
        grid = Table.grid(padding=(0, len(_GAP), 0, 0))
        cells: list[ProgressBar | Text] = [_joined(parts)]
        if left >= _MIN_BAR:
            bar = ProgressBar(self._train_iters, self._iteration, width=min(left, _MAX_BAR))
            grid.add_column(no_wrap=True)
            cells.insert(0, bar)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_row(*cells)
        self._live.update(grid, refresh=True)

    def _parts(self) -> list[_Part]:
        parts = [_Part(f"{self._iteration}/{self._train_iters}", 9, "bold")]
        if self._has_trained:
            parts += [_Part(text, each.worth, each.style) for each, text in line_columns(self._numbers, "live")]
        if self._worst:
            parts.append(_Part(f"fp8 {self._worst}", 5))
        if self._in_bf16:
            parts.append(_Part(f"{len(self._in_bf16)} fell back", 6, "yellow"))
        counts = _counted(self._counts[Level.WARNING], "warning") + _counted(self._counts[Level.ERROR], "error")
        if counts:
            parts.append(_Part(" ".join(counts), 6, "yellow"))
        return parts


def _largest(record: Record, quantity: str) -> float:
    """Of all tensors; a value that is not finite does not count."""
    values = [value for key, value in record.items() if key.endswith(f"/{quantity}") and not isinstance(value, str)]
    return max(values, default=0.0)


def _counted(number: int, name: str) -> list[str]:
    return [f"{number} {name}{'s' if number > 1 else ''}"] if number else []


def _fitting(parts: list[_Part], width: int) -> list[_Part]:
    """Those that fit, by their worth and then from the left; one at least."""
    kept: list[_Part] = []
    for part in sorted(parts, key=lambda part: -part.worth):
        if not kept or _width([*kept, part]) <= width:
            kept.append(part)
    return [part for part in parts if part in kept]


def _width(parts: list[_Part]) -> int:
    return sum(len(part.text) for part in parts) + len(_GAP) * (len(parts) - 1)


def _joined(parts: list[_Part]) -> Text:
    return Text(_GAP).join(Text(part.text, style=part.style) for part in parts)
