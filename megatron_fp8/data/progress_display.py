"""Owns what a person sees while texts are encoded: a bar on a terminal, lines elsewhere. Knows no files' contents."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_fp8.data.encode import EncodedBlock
from megatron_fp8.data.preprocess import Totals
from megatron_fp8.data.sources.files import InputFile

_SECONDS_BETWEEN_LINES = 30.0


class ProgressDisplay:
    """Documents/s and MB/s of text since the start of this process, the share of the inputs and the time left."""

    def __init__(self, files: Sequence[InputFile], action: str, documents_per_line: int | None) -> None:
        """`documents_per_line`: between lines where there is no terminal; None: a line every 30 s."""
        self._console = Console(stderr=True)
        self._documents_per_line = documents_per_line
        self._total_bytes = max(sum(file.size_bytes for file in files), 1)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[rate]}"))
        self._bar = Progress(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(action, total=self._total_bytes, rate="")
        self._num_documents_before = 0
        self._text_bytes = 0
        self._begun_bytes: int | None = None
        self._next_line = documents_per_line or 0

    def __enter__(self) -> ProgressDisplay:
        self._start = self._line_at = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def started(self, done: Totals | None) -> None:
        """Say what an earlier process has done."""
        if done is not None:
            self._num_documents_before = done.num_documents
            self._next_line += done.num_documents
            self._console.print(f"going on after {done.num_documents:,} documents, {done.num_tokens:,} tokens")

    def passed(self, done_bytes: int) -> None:
        """`done_bytes` of the inputs, as they are stored, have been read."""
        self._bar.update(self._task, completed=done_bytes)

    def encoded(self, encoded: EncodedBlock, totals: Totals) -> None:
        """A block has been encoded and written."""
        now, done_bytes = time.perf_counter(), encoded.block.done_bytes
        if self._begun_bytes is None:
            # What an earlier process has read says nothing about this one's pace.
            self._begun_bytes = 0 if self._num_documents_before == 0 else done_bytes
        self._text_bytes += encoded.block.size_bytes
        seconds = max(now - self._start, 1e-9)
        documents = (totals.num_documents - self._num_documents_before) / seconds
        rate = f"{documents:,.0f} documents/s, {self._text_bytes / seconds / 1e6:.1f} MB/s"
        self._bar.update(self._task, completed=done_bytes, rate=rate)
        if self._console.is_terminal or not self._is_line_due(now, totals.num_documents):
            return
        pace = (done_bytes - self._begun_bytes) / seconds
        left = f"{(self._total_bytes - done_bytes) / pace:,.0f} s left" if pace > 0 else "time left unknown"
        share = 100 * done_bytes / self._total_bytes
        self._console.print(f"{share:.1f} %: {totals.num_documents:,} documents, {rate}, {left}")

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
