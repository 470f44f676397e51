"""Where and with what figures were measured. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of Python and of `packages`; "not installed" where one is missing."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def cpu_model() -> str:
    """The CPU's name as Linux gives it, else what Python knows."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
