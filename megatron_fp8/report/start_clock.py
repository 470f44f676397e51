"""Times the parts of a job's start, from the command line to the end of the first step. Imports no torch."""

from __future__ import annotations

import time


class StartClock:
    """Starts when constructed; by the host's monotonic clock."""

    def __init__(self) -> None:
        self._started = self._part_started = time.monotonic()
        self._parts: dict[str, float] = {}
        self._ended = False

    @property
    def seconds(self) -> float:
        """Seconds since the job started."""
        return time.monotonic() - self._started

    def end_part(self, name: str) -> None:
        """Add the time since the previous part's end to part `name`; ignored once the start has ended."""
        if not self._ended:
            now = time.monotonic()
            self._parts[name] = self._parts.get(name, 0.0) + now - self._part_started
            self._part_started = now

    def end(self, name: str) -> dict[str, float] | None:
        """End the last part. Values of the `startup` record: `seconds`, and `PART-seconds`, which add up to it; None
        if the start has ended before."""
        if self._ended:
            return None
        self.end_part(name)
        self._ended = True
        return {"seconds": sum(self._parts.values()), **{f"{part}-seconds": s for part, s in self._parts.items()}}
