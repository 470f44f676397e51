"""Owns the look at this process's threads: where each is in Python, and whether the program waits for other ranks.

Works while the main thread sleeps or waits in C, as long as the interpreter is not held. Must not know what is done
about it.
"""

import linecache
import os
import re
import sys
import threading
import traceback
from types import FrameType

import torch.distributed

MOST_CHARACTERS = 30_000
# All below are collectives, or wait for one.
_COLLECTIVES = tuple(
    os.path.join(os.path.dirname(torch.distributed.__file__), name)  # noqa: PTH118, PTH120 - compared as text
    for name in ("distributed_c10d.py", "_functional_collectives.py", "c10d_logger.py")
)
# Calls that end when other ranks' data, or the device's work on it, has come.
_WAITS = re.compile(r"\.(wait|synchronize|item|tolist|cpu)\(|\bfloat\(")
_BACKWARD = os.path.join("torch", "autograd", "graph.py")  # noqa: PTH118


def thread_stacks(without: frozenset[int] = frozenset()) -> str:
    """The Python stacks of all threads but those `without`, the main thread first, as a traceback shows them."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
        if ident not in without
    ]
    return "\n".join(parts)[:MOST_CHARACTERS]


def waits_for_others() -> bool:
    """Whether the main thread is where a rank waits for others: in a collective, or for what comes of one."""
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident or 0)
    if main is None:
        return False
    if _waits(main):
        return True
    # Where the backward pass runs in threads of the device, it is they that wait.
    in_backward = main.f_code.co_filename.endswith(_BACKWARD)
    return in_backward and any(_waits(frame) for frame in frames.values() if frame is not main)


def _waits(innermost: FrameType) -> bool:
    path = innermost.f_code.co_filename
    if path in _COLLECTIVES:
        return True
    if path == threading.__file__:
        return False
    return bool(_WAITS.search(linecache.getline(path, innermost.f_lineno)))
