"""Ends a job that hangs, and names the rank that causes it.

Every rank has a thread that posts what the rank does (`heartbeat`) to the store, and looks for a verdict there. The
thread of a rank that has stood still for too long posts the stacks of its threads too, looks at all ranks twice, and
proposes a verdict (`hang`); the first one holds. Then all ranks end: the culprit at once with the verdict as its error,
so that the launcher takes it for the cause, the others some seconds later. Where the culprit cannot speak, the rank
that made the verdict does.

What may take long is not timed as a step is: loading, checkpoints and the first step, which compiles, have
`slow_seconds`. A long evaluation needs nothing of the kind: each of its micro-batches is a sign of life. A rank that is
within its limit, or moves, is never called hung, whatever others think.

A second thread only looks at the clock, for the case that the store does not answer and takes the first one with it.
Durations are taken from the monotonic clock. Must not know what a step consists of or where records go.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType

from torch.distributed import Store

from megatron_fp8.faults.device_look import DeviceLook
from megatron_fp8.faults.failure_report import SECONDS_FOR_THE_CAUSE, end_with
from megatron_fp8.monitors.hang import (
    Hang,
    HangBoard,
    HangError,
    Status,
    find_hang,
    thread_stacks,
    waits_for_others,
    without_store,
)
from megatron_fp8.monitors.heartbeat import Heartbeat

# How long the culprit may take to tell sinks of records; below the time that the others leave it.
_SECONDS_TO_TELL = 0.8 * SECONDS_FOR_THE_CAUSE


@dataclass(frozen=True)
class Limits:
    """How long a rank may stand still: in a step, and in what takes long; None: as long as it likes."""

    seconds: float
    slow_seconds: float | None

    def of(self, slow: bool) -> float:
        """The limit of a phase."""
        if not slow:
            return self.seconds
        return float("inf") if self.slow_seconds is None else self.slow_seconds

    @property
    def period_seconds(self) -> float:
        """Between two messages of a rank."""
        return min(5.0, self.seconds / 8)

    @property
    def silence_seconds(self) -> float:
        """After which a rank that has said nothing new does not speak any more; threads may be late on a busy host."""
        return max(4 * self.period_seconds, 6.0)


class Watchdog:
    """Watches this rank while it is entered, and ends the process when the job hangs.

    `device_is_idle`: whether this rank's device has done all that it was given; called from a thread. `tell`: called on
    every rank with the hang, from a thread, before the process ends; cut off after some seconds.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        store: Store,
        rank: int,
        world_size: int,
        limits: Limits,
        device_is_idle: Callable[[], bool],
        tell: Callable[[Hang], None],
    ) -> None:
        self._heartbeat = heartbeat
        self._rank = rank
        self._limits = limits
        self._device = DeviceLook(device_is_idle)
        self._tell = tell
        self._board = HangBoard(store, world_size, limits.silence_seconds)
        self._number = 0
        self._exchanged = time.monotonic()
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._threads = [
            threading.Thread(target=self._speak, name="watchdog", daemon=True),
            threading.Thread(target=self._look_at_the_clock, name="watchdog-clock", daemon=True),
        ]

    def __enter__(self) -> Watchdog:
        # Before anything can hang: a rank that never speaks could not be told from one that is to come.
        self._board.post(self._rank, self._status().to_json())
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        for thread in self._threads:
            # A thread that is inside the store's code when the interpreter ends would take the process with it.
            thread.join(self._limits.silence_seconds)

    def _speak(self) -> None:
        told = False
        while not self._stopped.wait(self._limits.period_seconds):
            try:
                hang = self._exchange()
            except RuntimeError as error:  # of which the store's errors are kinds
                if not told:
                    print(f"rank {self._rank}: the watchdog cannot speak: {error}", file=sys.stderr, flush=True)
                told = True
                continue
            if hang is not None:
                self._end(hang)
        # When a job ends, the process that keeps the store may have ended before: then nobody asks any more.
        with contextlib.suppress(RuntimeError):
            self._board.post(self._rank, replace(self._status(), left=True).to_json())

    def _exchange(self) -> Hang | None:
        """Say what this rank does; the verdict, if there is one or this rank can make one."""
        late = self._post()
        verdict = self._board.verdict()
        if verdict is None and late:
            verdict = self._judge()
        return Hang.from_json(verdict) if verdict is not None else None

    def _post(self) -> bool:
        """Whether this rank is late."""
        status = self._status()
        self._board.post(self._rank, status.to_json())
        self._exchanged = time.monotonic()
        return status.late

    def _post_for(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0 and not self._stopped.is_set():
            self._stopped.wait(min(left, self._limits.period_seconds))
            self._post()

    def _judge(self) -> str | None:
        # Ranks take turns, so that of a thousand a few look at all and not all.
        self._post_for(min(0.1 * self._rank, 5.0))
        verdict = self._board.verdict()
        if verdict is not None:
            return verdict
        before = self._board.messages()
        self._post_for(self._limits.silence_seconds)
        after = self._board.messages()
        both = sorted(before.keys() & after.keys())
        hang = find_hang(
            [Status.from_json(before[rank]) for rank in both],
            [Status.from_json(after[rank]) for rank in both],
            self._rank,
        )
        if hang is None or self._stopped.is_set():
            return None
        return self._board.propose(hang.to_json())

    def _status(self) -> Status:
        beat = self._heartbeat.beat
        still = time.monotonic() - beat.at
        late = still > self._limits.of(beat.slow)
        self._number += 1
        own = frozenset(thread.ident for thread in self._threads if thread.ident is not None)
        long = still > self._limits.seconds
        return Status(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            number=self._number,
            count=beat.count,
            iteration=beat.iteration,
            phase=beat.phase,
            still_seconds=still,
            since=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - still)),
            late=late,
            waits=long and waits_for_others(),
            device_works=long and self._device.has_work(),
            stacks=thread_stacks(own) if late else "",
        )

    def _look_at_the_clock(self) -> None:
        while not self._stopped.wait(self._limits.period_seconds):
            beat = self._heartbeat.beat
            now = time.monotonic()
            mute = now - self._exchanged
            if now - beat.at > self._limits.of(beat.slow) and mute > 3 * self._limits.silence_seconds:
                self._end(without_store(self._status(), mute))

    def _end(self, hang: Hang) -> None:
        if not self._ending.acquire(blocking=False):
            return
        # What hangs may be a disk or a terminal: then nothing can be told, and the process ends all the same.
        telling = threading.Thread(target=self._say_and_tell, args=(hang,), daemon=True)
        telling.start()
        telling.join(_SECONDS_TO_TELL)
        if self._rank != hang.speaker:
            time.sleep(SECONDS_FOR_THE_CAUSE)
        end_with(HangError(hang.text))

    def _say_and_tell(self, hang: Hang) -> None:
        text = hang.text if self._rank == hang.speaker else hang.text.partition("\n")[0]
        print(f"rank {self._rank}: {text}", file=sys.stderr, flush=True)
        self._tell(hang)
