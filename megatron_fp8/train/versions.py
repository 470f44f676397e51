"""Owns which versions a run and its checkpoints name. Imports no torch."""

import platform
from importlib.metadata import version

from megatron_fp8 import __version__

_PACKAGES = ("torch", "megatron-core", "transformer-engine")


def versions() -> dict[str, str]:
    """Of this program, of the packages that numbers depend on, and of Python."""
    packages = {name: version(name) for name in _PACKAGES}
    return {"megatron-fp8": __version__, **packages, "python": platform.python_version()}
