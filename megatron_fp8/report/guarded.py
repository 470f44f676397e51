"""Owns that a sink which fails stops neither training nor the other sinks, and that it gets what it missed.

Must not know what the sink writes. Imports no torch.
"""

import contextlib
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from megatron_fp8.report.opening import StillOpeningError
from megatron_fp8.report.record import (
    BrokenLines,
    Record,
    Sink,
    iteration_of,
    json_line,
    read_records,
)

# Counted in records, not in seconds: the same run tries at the same places.
FIRST_PAUSE_RECORDS = 16
LONGEST_PAUSE_RECORDS = 1024
MOST_WAITING_RECORDS = 1024

Say = Callable[[str], None]


# Opens a sink that is to keep what it has up to an iteration; the sink, and the iteration up to which it has everything
# (-1: nothing).
OpenSink = Callable[[int], tuple[Sink, int]]


def say_on_stderr(text: str) -> None:
    """A line on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


class Guarded:
    """A sink behind a guard.

    `open_sink` is called at the first record and after each failure, since what is wrong with a sink that failed is not
    known; `iteration`: that up to which it has what it should keep. A sink that is made from the `record` (the path of
    a `metrics.jsonl`) then gets what it lacks of it, before anything new. Records wait meanwhile, the newest 1024 of
    them; after n failures in a row 16 x 2^(n-1) records pass before the next attempt, 1024 at most. The first failure
    of several is told, and the end of them. `advice`: what a person can do who wants the rest.
    """

    def __init__(
        self,
        name: str,
        open_sink: OpenSink,
        advice: str,
        record: Path | None = None,
        iteration: int = -1,
        say: Say = say_on_stderr,
    ) -> None:
        self._name = name
        self._open_sink = open_sink
        self._advice = advice
        self._record = record
        self._complete = iteration
        self._say = say
        self._sink: Sink | None = None
        self._waiting: deque[Record] = deque(maxlen=MOST_WAITING_RECORDS)
        self._lost = 0
        self._failures = 0
        self._pause = 0

    def write(self, record: Record) -> None:
        """Hand a record on, now or when the sink works again."""
        self._lost += len(self._waiting) == MOST_WAITING_RECORDS
        self._waiting.append(record)
        if self._pause > 0:
            self._pause -= 1
        else:
            self._deliver()

    def close(self) -> None:
        """Hand on what still waits, in one more attempt, and close the sink."""
        if self._waiting:
            self._deliver_at_last()
        missing = len(self._waiting) + self._lost
        if missing:
            self._say(f"{self._name}: {missing} records are missing there; {self._advice}")
        if self._sink is not None:
            try:
                self._sink.close()
            except Exception as error:  # noqa: BLE001 - whatever it is, the training was done
                self._say(f"{self._name} could not be closed: {_text(error)}; {self._advice}")

    def _deliver_at_last(self) -> None:
        opening = self._deliver()
        if opening is not None:
            opening.wait()
            self._deliver()

    def _deliver(self) -> StillOpeningError | None:
        """Hand on what waits, unless the sink is still being opened, for which then can be waited."""
        try:
            if self._sink is None:
                self._sink, newest = self._open_sink(self._complete)
                if self._record is not None:
                    self._hand_over(self._sink, self._record, newest)
            while self._waiting:
                self._sink.write(self._waiting[0])
                # Other records of the same iteration may be still to come.
                self._complete = max(self._complete, iteration_of(self._waiting.popleft(), 0) - 1)
        except StillOpeningError as opening:
            return opening
        except Exception as error:  # noqa: BLE001 - whatever it is, training must go on
            self._failed(error)
        else:
            if self._failures:
                self._say(f"{self._name} works again" + (f", without {self._lost} records" if self._lost else ""))
            self._failures = 0
        return None

    def _hand_over(self, sink: Sink, path: Path, newest: int) -> None:
        # The record is written first, unless its disk is full: what waits is in it.
        waiting = {json_line(record): record for record in self._waiting}
        broken = BrokenLines()
        for record in read_records(path, broken) if path.exists() else ():
            if iteration_of(record, newest + 1) > newest:
                sink.write(record)
            waiting.pop(json_line(record), None)
        if str(broken):
            self._say(f"{self._name}: {broken}")
        self._waiting = deque(waiting.values(), maxlen=MOST_WAITING_RECORDS)
        self._lost = 0

    def _failed(self, error: Exception) -> None:
        if self._sink is not None:
            # What is wrong with it was just caught.
            with contextlib.suppress(Exception):
                self._sink.close()
            self._sink = None
        if not self._failures:
            self._say(f"{self._name} failed: {_text(error)}; training goes on, and it is tried again; {self._advice}")
        self._pause = min(FIRST_PAUSE_RECORDS << self._failures, LONGEST_PAUSE_RECORDS)
        self._failures = min(self._failures + 1, 16)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
