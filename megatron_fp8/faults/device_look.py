"""Asks whether this rank's device still has work, without ever blocking the caller.

A host that has run ahead until the launch queue is full stands in a launch, in any line of the program, and may hold
the driver's lock while it does: the question is asked in a thread of its own, and no answer is one too. Must not know
what follows.
"""

import threading
from collections.abc import Callable

_SECONDS_TO_ANSWER = 1.0


class DeviceLook:
    """`is_idle`: asks the device, whether it has done all that it was given."""

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle
        self._asked: threading.Thread | None = None
        self._idle = False

    def has_work(self) -> bool:
        """Whether the device has not done all; also where it cannot be asked, since somebody waits for it."""
        if self._asked is None or not self._asked.is_alive():
            self._idle = False
            self._asked = threading.Thread(target=self._ask, name="watchdog-device", daemon=True)
            self._asked.start()
        self._asked.join(_SECONDS_TO_ANSWER)
        return not self._idle

    def _ask(self) -> None:
        self._idle = self._is_idle()
