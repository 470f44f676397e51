"""Memory figures of `torch.cuda`, taken from the process itself: resident size and its peak, in bytes.

The allocator of a CPU does not count per tensor, so "allocated" and "reserved" are both what the process
holds in RAM (code and libraries included). The peak is the kernel's own high-water mark since the start or
the last reset.
"""

# ruff: noqa: ARG001  (the signatures are torch's)
from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see clear_refs in proc(5)


def memory_allocated(device: Any = None) -> int:
    """Resident bytes of this process."""
    return psutil.Process().memory_info().rss


def max_memory_allocated(device: Any = None) -> int:
    """Peak resident bytes of this process since its start or `reset_peak_memory_stats`."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return max(int(line.split()[1]) * 1024, memory_allocated())
    raise NotImplementedError(f"torch.cuda.max_memory_allocated: {_STATUS} has no VmHWM on this system")


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start the peak anew from the present resident size."""
    _CLEAR_REFS.write_text(_RESET_PEAK)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Available and total bytes of the machine."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def memory_stats(device: Any = None) -> dict[str, int]:
    """The figures of `torch.cuda.memory_stats` that have a meaning here; asking for others is a KeyError."""
    current, peak = memory_allocated(), max_memory_allocated()
    stats = {"num_alloc_retries": 0, "num_ooms": 0}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{kind}.all.current"] = current
        stats[f"{kind}.all.peak"] = peak
    return stats


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """One line for a log."""
    return f"CPU stand-in: {memory_allocated() / 2**20:.0f} MiB resident, peak {max_memory_allocated() / 2**20:.0f} MiB"


FUNCTIONS = {
    "memory_allocated": memory_allocated,
    "memory_reserved": memory_allocated,
    "memory_cached": memory_allocated,
    "max_memory_allocated": max_memory_allocated,
    "max_memory_reserved": max_memory_allocated,
    "max_memory_cached": max_memory_allocated,
    "reset_peak_memory_stats": reset_peak_memory_stats,
    "reset_max_memory_allocated": reset_peak_memory_stats,
    "reset_max_memory_cached": reset_peak_memory_stats,
    "mem_get_info": mem_get_info,
    "memory_stats": memory_stats,
    "memory_summary": memory_summary,
}
