"""This process's memory on the host: its peak, and malloc's settings."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import psutil

# glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST_INT = 2**31 - 1
# glibc reads these itself; a user who sets one wants it.
_USERS_CHOICE = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory instead of returning it to the kernel; return whether it does now.

    It does not if the environment already tunes malloc, or under another C library. glibc returns large freed blocks at
    once, such as a GEMM's FP32 operands, and every step faults their pages in again, zeroed by the kernel; GPUs have
    torch's caching allocator for this. On a Llama-style stack, hidden 512, 2048 tokens, one thread: 1,400 page faults a
    step instead of 7,000 to 28,000, and 1 % (BF16) to 5 % (FP8) less CPU time, at the same peak memory.
    """
    if any(name in os.environ for name in _USERS_CHOICE):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Without mmap, blocks come from the heap, which is trimmed only above the threshold. 1 is success.
    return mallopt(_M_MMAP_MAX, 0) == 1 and mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT) == 1


def peak_resident_bytes() -> int:
    """The kernel's high-water mark of this process's resident memory (VmHWM), code and libraries included."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return max(int(line.split()[1]) * 1024, int(psutil.Process().memory_info().rss))
    raise NotImplementedError(f"peak resident memory: {status} has no VmHWM on this system")
