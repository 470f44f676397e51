"""Owns what a person sees while files are measured: a bar on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 30.0


class WindowProgress:
    """Windows of a file on standard error, while it is entered; `shows`: false on every rank but one."""

    def __init__(self, shows: bool, console: Console | None = None) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._shows = shows
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not (shows and self._console.is_terminal),
        )
        self._task = self._bar.add_task("", total=None)
        self._line_at = self._started = time.monotonic()
        self._name: str | None = None

    def __enter__(self) -> WindowProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, name: str, total: int, done: int) -> None:
        """`done` of the `total` windows of the file `name` are measured."""
        self._bar.update(self._task, description=name, total=total, completed=done)
        now = time.monotonic()
        if name != self._name:
            self._name, self._started, self._line_at = name, now, now
        if not self._shows or self._console.is_terminal or now - self._line_at < _SECONDS_BETWEEN_LINES or done == 0:
            return
        self._line_at = now
        left = (now - self._started) / done * (total - done)
        self._console.print(f"{name}: {done:,} of {total:,} windows, {left:,.0f} s left", highlight=False)
