"""Owns the one live line at the bottom of a terminal: which numbers it shows, and what goes first where it is narrow.

One line, not a table: other ranks, launchers and libraries write to the same terminal without asking. What they write
ends up behind or below a single line; of several lines, redrawing would erase it. Nothing is drawn between records, and
the cursor stays visible, so that a run that is killed leaves the terminal as it was. Imports no torch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_fp8.report.durations import format_seconds
from megatron_fp8.report.events import Level, event_level
from megatron_fp8.report.record import Record

_GAP = "  "
# Of the tensor with the largest share.
_SHARES = {"clip": "clipped", "flush": "flushed"}
_SHORTEST_BAR, _LONGEST_BAR = 8, 30


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
        self._train: Record = {}
        self._validation: float | None = None
        self._worst: dict[str, float] = {}
        self._in_bf16: set[int] = set()
        self._counts = {Level.WARNING: 0, Level.ERROR: 0}
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            # To another place than the terminal it goes as it is.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        console.show_cursor(True)
        self._draw()

    def take(self, record: Record) -> None:
        """Take over the numbers of a record, and draw the line anew."""
        event = record["event"]
        if event == "train":
            self._train = record
            self._iteration = int(record["iteration"] or 0)
        elif event == "validation":
            self._validation = record["lm loss validation"]
        elif event == "fp8-check":
            self._worst = {name: _largest(record, quantity) for name, quantity in _SHARES.items()}
            self._in_bf16 = set(record["fallen-back-layers"])
        elif event == "fp8-fallback":
            change = self._in_bf16.add if record["runs in"] == "bf16" else self._in_bf16.discard
            change(int(record["layer"] or 0))
        level = event_level(record)
        if level in self._counts:
            self._counts[level] += 1
        self._draw()

    def close(self) -> None:
        """Take the line away."""
        self._live.stop()

    def _draw(self) -> None:
        # A line as wide as the terminal would wrap in some.
        width = self._console.width - 1
        parts = _fitting(self._parts(), width)
        left = width - _width(parts) - len(_GAP)
        grid = Table.grid(padding=(0, len(_GAP), 0, 0))
        cells: list[ProgressBar | Text] = [_joined(parts)]
        if left >= _SHORTEST_BAR:
            bar = ProgressBar(self._train_iters, self._iteration, width=min(left, _LONGEST_BAR))
            grid.add_column(no_wrap=True)
            cells.insert(0, bar)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_row(*cells)
        self._live.update(grid, refresh=True)

    def _parts(self) -> list[_Part]:
        train, warnings, errors = self._train, self._counts[Level.WARNING], self._counts[Level.ERROR]
        parts = [_Part(f"{self._iteration}/{self._train_iters}", 9, "bold")]
        if train:
            loss, mfu = train["lm loss"], train.get("mfu")
            parts.append(_Part("loss -" if loss is None else f"loss {loss:.4f}", 8, "bold"))
            if self._validation is not None:
                parts.append(_Part(f"val {self._validation:.4f}", 1))
            parts.append(_Part(f"{short_count(float(train['tokens-per-second'] or 0.0))} tok/s", 4))
            if mfu is not None:
                parts.append(_Part(f"MFU {mfu:.0%}", 2))
            if train.get("skipped-iterations"):
                parts.append(_Part(f"skipped {train['skipped-iterations']}", 3, "yellow"))
        if self._worst:
            text = " ".join(f"{name} {100 * share:.2g}%" for name, share in self._worst.items())
            parts.append(_Part(f"fp8 {text}", 5))
        if self._in_bf16:
            parts.append(_Part(f"{len(self._in_bf16)} fell back", 6, "yellow"))
        if warnings or errors:
            parts.append(_Part(" ".join(_counted(warnings, "warning") + _counted(errors, "error")), 6, "yellow"))
        if train:
            parts.append(_Part(f"{format_seconds(float(train['seconds-left'] or 0.0))} left", 7))
        return parts


def short_count(number: float) -> str:
    """Three digits of a count: `950`, `12.3k`, `1.24M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + letter
    return f"{number:.0f}"


def _largest(record: Record, quantity: str) -> float:
    """Of all tensors; what is not finite has no share."""
    values = [value for key, value in record.items() if key.endswith(f"/{quantity}") and isinstance(value, float | int)]
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
