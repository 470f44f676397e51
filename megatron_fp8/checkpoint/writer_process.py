"""Forks the process that writes a rank's part of a checkpoint, and returns its error to the rank.

The parent may use a GPU, and CUDA does not survive a fork. So the child gets its data in ordinary host memory, touches
nothing of CUDA, collects no garbage (which could free the parent's tensors) and ends without Python's shutdown. It ends
with its rank: the writer of a killed rank would write under a name that the next job uses too, and keep the rank's
connections open, so that the other ranks would wait for it until their timeout. Imports no torch.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

# Less than a pipe's buffer: a writer must not wait for its reader.
_MAX_CHARACTERS = 8000
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class WriterProcess:
    """A forked process that runs `work`. Raises OSError if it cannot be started."""

    def __init__(self, work: Callable[[], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._answer, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(work, theirs, os.getpid()), name="checkpoint writer")
        self._process.start()
        theirs.close()

    def is_running(self) -> bool:
        """Whether it is still running."""
        return self._process.is_alive()

    def wait(self) -> str | None:
        """Wait for its end; the error, or None."""
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
        return (
            f"the writer process was killed by signal {-code}" if code < 0 else f"the writer process exited with {code}"
        )


def _run(work: Callable[[], None], answer: Connection, parent_pid: int) -> None:
    gc.disable()
    code = 1
    try:
        die_with(parent_pid)
        work()
        code = 0
    except BaseException as error:  # noqa: BLE001 - the rank reports it
        answer.send_bytes((str(error) or repr(error))[:_MAX_CHARACTERS].encode())
    finally:
        os._exit(code)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent `parent_pid` ends, or now if it has ended. Raises OSError.

    The kernel watches the thread that forked: here the main one.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
