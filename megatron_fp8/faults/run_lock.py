"""Owns that one job at a time writes into a run's directory: a lock of the system, which goes with the process.

A second job of the same name, started by mistake or by a scheduler that takes the first for dead, would otherwise sweep
away the checkpoint that the first one is writing, and both would write one record. Imports no torch.
"""

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_fp8.config.problem import BadInputError

LOCK = ".lock"
# A job that was started again may meet the end of the one before: a process that dies, a file server that notices.
SECONDS_TO_WAIT = 60.0
_SECONDS_BETWEEN_TRIES = 0.2


@contextmanager
def locked_run(directory: Path, seconds_to_wait: float = SECONDS_TO_WAIT) -> Iterator[None]:
    """The directory is this process's while this is entered, or until the process ends.

    Raises BadInputError where another process keeps it. Says so, and goes on, where the disk has no locks.
    """
    with (directory / LOCK).open("a+", encoding="utf-8") as file:
        ends = time.monotonic() + seconds_to_wait
        while not _taken(file.fileno(), directory):
            if time.monotonic() >= ends:
                file.seek(0)
                raise BadInputError(
                    f"{directory} is in use by {file.read().strip() or 'another process'}: it would be written by two "
                    "jobs\n    use: another run.name, or end that job first"
                )
            time.sleep(_SECONDS_BETWEEN_TRIES)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        yield


def _taken(descriptor: int, directory: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        print(f"warning: {directory} cannot be locked against a second job: {error}", file=sys.stderr, flush=True)
    return True
