"""Lets one job at a time write into a run's directory: a lock of the system, which ends with the process.

A job takes it before it looks for the checkpoint to go on from: what it chose is then still the newest when it goes on.

A second job of the same name, started by mistake or by a scheduler that takes the first for dead, would otherwise sweep
away the checkpoint that the first one is writing, and both would write one record. Imports no torch.
"""

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from megatron_fp8.checkpoint.directory import lock_for_reading
from megatron_fp8.config.run_start import LOCK
from megatron_fp8.errors import BadInputError

# A job that was started again may meet the end of the one before: a process that saves or dies, a file server that
# notices. Rather less than the ten minutes for which the other ranks wait for this one by default.
SECONDS_TO_WAIT = 540.0
SECONDS_BETWEEN_WORDS = 60.0
_SECONDS_BETWEEN_TRIES = 0.2


@contextmanager
def locked_run(directory: Path, seconds_to_wait: float = SECONDS_TO_WAIT) -> Iterator[None]:
    """The directory is this process's while this is entered, or until the process ends.

    Raises BadInputError where another process keeps it; until then it says every minute for whom it waits. Says so,
    and goes on, where the disk has no locks.
    """
    with (directory / LOCK).open("a+", encoding="utf-8") as file:
        started = says_so_at = time.monotonic()
        while not _taken(file.fileno(), directory):
            now = time.monotonic()
            if says_so_at > started and now >= started + seconds_to_wait:
                raise BadInputError(
                    f"{directory} is in use by {_holder(file)}: it would be written by two "
                    "jobs\n    use: another run.name, or end that job first"
                )
            if now >= says_so_at:
                waits = f"waiting up to {started + seconds_to_wait - now:.0f} s for its end"
                print(f"warning: {directory} is in use by {_holder(file)}: {waits}", file=sys.stderr, flush=True)
                says_so_at = now + SECONDS_BETWEEN_WORDS
            time.sleep(_SECONDS_BETWEEN_TRIES)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        yield


class Holds:
    """What this process lets nobody else write or remove, until it lets go or ends.

    `seconds_to_wait`: for a job that writes into the run's directory.
    """

    def __init__(self, seconds_to_wait: float = SECONDS_TO_WAIT) -> None:
        self._seconds_to_wait = seconds_to_wait
        self._run: Path | None = None
        self._of_run, self._of_checkpoint = ExitStack(), ExitStack()

    def run(self, directory: Path) -> None:
        """Let no other job write into a run's directory. Raises BadInputError where one does and goes on doing so."""
        if self._run != directory:
            self._of_run.enter_context(locked_run(directory, self._seconds_to_wait))
            self._run = directory

    def checkpoint(self, path: Path) -> bool:
        """Let no job remove a checkpoint, and let go of another one; False: it is gone already."""
        self.let_checkpoint_go()
        return self._of_checkpoint.enter_context(lock_for_reading(path))

    def let_checkpoint_go(self) -> None:
        """The checkpoint has been read."""
        self._of_checkpoint.close()

    def let_go(self) -> None:
        """Let go of everything."""
        self.let_checkpoint_go()
        self._of_run.close()
        self._run = None


def _holder(file: TextIO) -> str:
    file.seek(0)
    return file.read().strip() or "another process"


def _taken(descriptor: int, directory: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        print(f"warning: {directory} cannot be locked against a second job: {error}", file=sys.stderr, flush=True)
    return True
