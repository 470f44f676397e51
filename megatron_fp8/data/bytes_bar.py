"""Owns the bar that a person sees while token files are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def bytes_bar(name: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on a terminal's standard error, nothing elsewhere; gives the function that advances it."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(Path(name).name, total=total_bytes)
        yield lambda number: progress.advance(task, number)
