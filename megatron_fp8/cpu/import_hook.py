"""Runs a patch right after a module is first imported.

The stand-in changes a few functions of packages that it does not import itself: importing Transformer Engine takes
seconds, which a program that never uses it should not pay.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Patch = Callable[[ModuleType], None]


class _PatchingLoader(importlib.abc.Loader):
    """The module's own loader, followed by one patch."""

    def __init__(self, loader: importlib.abc.Loader, patch: Patch) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)

    def __getattr__(self, name: str) -> object:
        # inspect, pkgutil and importlib.resources read sources and files through the loader.
        return getattr(self._loader, name)


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Wraps the loaders of the modules that have a patch."""

    def __init__(self, patches: dict[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.get(fullname)
        if patch is None:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _PatchingLoader(spec.loader, patch)
                return spec
        return None


def patch_after_import(patches: dict[str, Patch]) -> None:
    """Call `patches[name](module)` once module `name` is loaded, immediately if it is already in `sys.modules`.

    An exception from a patch propagates to the import.
    """
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _PatchingFinder(patches))
