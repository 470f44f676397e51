"""Owns that the process which writes a checkpoint ends with the rank that started it. Must not know what it writes.

The writer of a rank that was killed would go on writing under a name that the next start of the job uses too, and hold
the rank's connections open, so that the other ranks would wait for its answers until their timeout. Imports no torch.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when the process `parent_pid`, which forked it, has ended; also if it has.

    What counts is the thread that forked, here the main one. Raises OSError.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
