"""Owns the process that writes a rank's part of a checkpoint: forked, told to end with its rank, asked how it went.

It is forked from a process that may use a GPU. What it is given lies in the host's ordinary memory, which a forked
process sees as it was. CUDA does not survive a fork: the child touches nothing of it, collects no garbage (which could
free the parent's tensors) and ends without Python's shutdown. Must not know what is written.
"""

import gc
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection

from megatron_fp8.checkpoint.orphan import die_with

# Less than a pipe holds: a writer must not wait for its reader.
_MOST_CHARACTERS = 8000


class WriterProcess:
    """A forked process in which `work` runs. Raises OSError where there can be none."""

    def __init__(self, work: Callable[[], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._answer, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(work, theirs, os.getpid()), name="checkpoint writer")
        self._process.start()
        theirs.close()

    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def wait(self) -> str | None:
        """What went wrong, after it has ended; None: nothing did."""
        self._process.join()
        code = self._process.exitcode
        try:
            reason = self._answer.recv_bytes().decode() if self._answer.poll() else ""
        except EOFError:
            reason = ""
        self._answer.close()
        self._process.close()
        if code == 0:
            return None
        if reason:
            return reason
        assert code is not None
        return f"the process that writes was killed by signal {-code}" if code < 0 else f"its writer ended with {code}"


def _run(work: Callable[[], None], answer: Connection, parent_pid: int) -> None:
    gc.disable()
    code = 1
    try:
        die_with(parent_pid)
        work()
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, the rank says it
        answer.send_bytes((str(error) or repr(error))[:_MOST_CHARACTERS].encode())
    finally:
        os._exit(code)
