"""What this process holds in RAM, in bytes: the host's figure, beside `torch.cuda`'s of the emulated GPU.

Code and libraries included. The peak is the kernel's own high-water mark since the start or the last reset.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see clear_refs in proc(5)


def resident_bytes() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Peak resident bytes of this process since its start or `reset_peak`."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return max(int(line.split()[1]) * 1024, resident_bytes())
    raise NotImplementedError(f"peak resident memory: {_STATUS} has no VmHWM on this system")


def reset_peak() -> None:
    """Start the peak anew from the present resident size."""
    _CLEAR_REFS.write_text(_RESET_PEAK)
