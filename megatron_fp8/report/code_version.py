"""Says what code a run is of: versions of packages and, in a checkout, git's commit. Imports no torch."""

import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_fp8 import __version__

_ROOT = Path(__file__).parents[2]
_MAX_SECONDS = 10.0
_PACKAGES = ("torch", "megatron-core", "transformer-engine")


def versions() -> dict[str, str]:
    """Of this program, of the packages that numbers depend on, and of Python."""
    packages = {name: version(name) for name in _PACKAGES}
    return {"megatron-fp8": __version__, **packages, "python": platform.python_version()}


def code_version() -> dict[str, str | bool]:
    """`version`; in a checkout also `commit`, and `changes`: whether tracked files differ from it."""
    commit = _git("rev-parse", "HEAD") if (_ROOT / ".git").exists() else None
    if commit is None:
        return {"version": __version__}
    changes = bool(_git("status", "--porcelain", "--untracked-files=no"))
    return {"version": __version__, "commit": commit, "changes": changes}


def describe_code(code: Mapping[str, Any]) -> str:
    """As `0.1.0, commit 1a2b3c..., with local changes`."""
    commit = f", commit {code['commit']}" if code.get("commit") else ""
    return f"{code['version']}{commit}{', with local changes' if code.get('changes') else ''}"


def _git(*arguments: str) -> str | None:
    """What git says of the checkout, None where it cannot."""
    try:
        ended = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=_MAX_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()
