"""Loads Megatron Core's compiled index helpers without importing Megatron Core, which imports torch."""

from __future__ import annotations

import functools
import importlib.util
import platform
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

from megatron_fp8.errors import BadInputError

NAME = "megatron.core.datasets.helpers_cpp"


class HelpersError(BadInputError):
    """Megatron Core or its compiled helpers are not installed."""


@functools.cache
def compiled_helpers() -> ModuleType:
    """The module `megatron.core.datasets.helpers_cpp`. Raises HelpersError if there is none."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    # Finds the package without running its code.
    package = importlib.util.find_spec("megatron.core")
    places = list(package.submodule_search_locations or ()) if package is not None else []
    for place in places:
        for suffix in EXTENSION_SUFFIXES:
            path = Path(place) / "datasets" / f"helpers_cpp{suffix}"
            if path.is_file():
                return _load(path)
    raise HelpersError(
        f"megatron-core has no compiled {NAME} for Python {platform.python_version()} on {platform.machine()}. Install "
        "a wheel of megatron-core for this platform, or compile it with pybind11 and a C++ compiler"
    )


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise HelpersError(f"{path} cannot be loaded: {error}. Reinstall megatron-core") from error
    return module
