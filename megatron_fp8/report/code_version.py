"""Owns which code a run is of: the package's version and, in a checkout, git's commit. Imports no torch."""

import subprocess
from pathlib import Path

from megatron_fp8 import __version__

_ROOT = Path(__file__).parents[2]
_MOST_SECONDS = 10.0


def code_version() -> str:
    """As `0.1.0, commit 1a2b3c..., with changes`; without a checkout or git the version alone."""
    if not (_ROOT / ".git").exists():
        return __version__
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return __version__
    changes = ", with changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{__version__}, commit {commit}{changes}"


def _git(*arguments: str) -> str | None:
    """What git says of the checkout, None where it cannot."""
    try:
        ended = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=_MOST_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()
