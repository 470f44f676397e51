"""Progress of commands on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

if TYPE_CHECKING:
    from megatron_fp8.prepare.encode import EncodedBlock
    from megatron_fp8.prepare.input_files import InputFile
    from megatron_fp8.prepare.preprocess import Progress as Done

_SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def bytes_bar(name: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes; yields the function that advances it."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(Path(name).name, total=total_bytes)
        yield lambda number: bar.advance(task, number)


@contextmanager
def items_bar(
    what: str, shows: bool = True, console: Console | None = None
) -> Iterator[Callable[[str, int, int], None]]:
    """A bar, or a line every 30 s, of counted items; yields what to call with a name, the total, and how many are done.

    `what`: the items, in the plural. `shows`: true on one rank. A new name starts the times again.
    """
    console = Console(stderr=True) if console is None else console
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    is_hidden = not (shows and console.is_terminal)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=is_hidden) as bar:
        task = bar.add_task(what, total=None)
        shown, started, line_at = "", 0.0, 0.0

        def show(name: str, total: int, done: int) -> None:
            nonlocal shown, started, line_at
            bar.update(task, description=name, total=total, completed=done)
            now = time.monotonic()
            if name != shown:
                shown, started, line_at = name, now, now
            if not shows or console.is_terminal or now - line_at < _SECONDS_BETWEEN_LINES or done == 0:
                return
            line_at = now
            left = (now - started) / done * (total - done)
            console.print(f"{name}: {done:,} of {total:,} {what}, {left:,.0f} s left", highlight=False)

        yield show


class EncodingProgress(Progress):
    """A bar with documents/s, MB/s and the time left; without a terminal, lines."""

    def __init__(self, files: Sequence[InputFile], action: str, documents_per_line: int | None) -> None:
        """`documents_per_line`: between lines without a terminal; None: a line every 30 s."""
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[rate]}"))
        times = TimeElapsedColumn(), TimeRemainingColumn(elapsed_when_finished=True)
        super().__init__(*columns, *times, console=console, disable=not console.is_terminal)
        self._documents_per_line = documents_per_line
        self._total_bytes = max(sum(file.size_bytes for file in files), 1)
        self._inputs = self.add_task(action, total=self._total_bytes, rate="")
        self._documents_before = 0
        self._text_bytes = 0
        self._start_bytes: int | None = None
        self._next_line = documents_per_line or 0
        self._started_at = self._line_at = time.perf_counter()

    def resumed(self, done: Done | None) -> None:
        """Report what an earlier process has done."""
        if done is not None:
            self._documents_before = done.num_documents
            self._next_line += done.num_documents
            self.console.print(f"resuming after {done.num_documents:,} documents, {done.num_tokens:,} tokens")

    def passed(self, done_bytes: int) -> None:
        """`done_bytes` of the inputs, as stored, have been read."""
        self.update(self._inputs, completed=done_bytes)

    def encoded(self, encoded: EncodedBlock, done: Done) -> None:
        """A block has been encoded and written."""
        now, done_bytes = time.perf_counter(), encoded.block.done_bytes
        if self._start_bytes is None:
            # What an earlier process has read does not count for this one's speed.
            self._start_bytes = 0 if self._documents_before == 0 else done_bytes
        self._text_bytes += encoded.block.size_bytes
        seconds = max(now - self._started_at, 1e-9)
        documents = (done.num_documents - self._documents_before) / seconds
        rate = f"{documents:,.0f} documents/s, {self._text_bytes / seconds / 1e6:.1f} MB/s"
        self.update(self._inputs, completed=done_bytes, rate=rate)
        if self.console.is_terminal or not self._is_line_due(now, done.num_documents):
            return
        speed = (done_bytes - self._start_bytes) / seconds
        left = f"{(self._total_bytes - done_bytes) / speed:,.0f} s left" if speed > 0 else "time left unknown"
        share = 100 * done_bytes / self._total_bytes
        self.console.print(f"{share:.1f} %: {done.num_documents:,} documents, {rate}, {left}")

    def _is_line_due(self, now: float, num_documents: int) -> bool:
        if self._documents_per_line is None:
            due = now - self._line_at >= _SECONDS_BETWEEN_LINES
        else:
            due = num_documents >= self._next_line
            while num_documents >= self._next_line:
                self._next_line += self._documents_per_line
        if due:
            self._line_at = now
        return due
