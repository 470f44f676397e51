"""Owns that a view which takes long to open, because a server has to answer, is opened beside training.

Imports no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from megatron_fp8.report.record import Sink

OpenSink = Callable[[int], tuple[Sink, int]]


class StillOpeningError(Exception):
    """The view is not open yet; `wait` until it is, or has failed."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__("still opening")
        self.wait = wait


class OpenInThread:
    """Opens by `open_sink` in a thread; calls raise StillOpeningError until one can give, or raise, what came of it."""

    def __init__(self, open_sink: OpenSink) -> None:
        self._open_sink = open_sink
        self._thread: threading.Thread | None = None
        self._opened: tuple[Sink, int] | None = None
        self._error: Exception | None = None

    def __call__(self, kept: int) -> tuple[Sink, int]:
        """As the function that opens."""
        if self._thread is None:
            self._opened, self._error = None, None
            self._thread = threading.Thread(target=self._open, args=(kept,), name="opening", daemon=True)
            self._thread.start()
        if self._thread.is_alive():
            raise StillOpeningError(self._thread.join)
        self._thread = None
        if self._error is not None:
            raise self._error
        assert self._opened is not None
        return self._opened

    def _open(self, kept: int) -> None:
        try:
            self._opened = self._open_sink(kept)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next call raises it
            self._error = error
