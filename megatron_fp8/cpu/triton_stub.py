"""A `triton` package without kernels, so that modules which define Triton kernels can be imported.

Transformer Engine does, for permutation, padding and cross entropy. Decorating a kernel works; launching one, or
calling anything else of Triton's, raises NotImplementedError with its name.
"""

# ruff: noqa: ARG001, ARG002  (the signatures are Triton's)
from __future__ import annotations

import functools
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, NoReturn

_SUBMODULES = ("language", "language.core", "language.standard", "language.math", "runtime", "compiler")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(f"{name} is a Triton kernel or needs Triton: the CPU stand-in has none")


class _Name:
    """A name of Triton's that can be mentioned (in an annotation, as an attribute) but not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> _Name:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Name(f"{self.__name__}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self.__name__)

    def __repr__(self) -> str:
        return f"<{self.__name__} of the CPU stand-in>"


class Kernel:
    """What `triton.jit` and `triton.autotune` return; cannot be launched."""

    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)
        self.fn = function

    def run(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self.__name__)  # type: ignore[attr-defined]

    __call__ = __getitem__ = run


class Config:
    """A tuning candidate, never used."""

    def __init__(self, kwargs: dict[str, Any], **options: Any) -> None:
        self.kwargs = kwargs
        self.options = options


class constexpr:
    """A compile-time constant, which modules create at import."""

    def __init__(self, value: Any) -> None:
        self.value = value


def jit(function: Any = None, **options: Any) -> Any:
    """`@triton.jit` and `@triton.jit(...)`."""
    return Kernel if function is None else Kernel(function)


def decorator_factory(*args: Any, **options: Any) -> Any:
    """`@triton.autotune(...)` and `@triton.heuristics(...)`: return the kernel unchanged."""
    return lambda kernel: kernel


def build_stub() -> dict[str, ModuleType]:
    """The stub package and its submodules, by name, for `sys.modules`."""
    modules = {"triton": _module("triton", is_package=True)}
    for name in _SUBMODULES:
        modules[f"triton.{name}"] = _module(f"triton.{name}", is_package=name == "language")
    for name in sorted(modules, key=len):
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(modules[parent], leaf, modules[name])
    vars(modules["triton"]).update(
        __version__="0.0.0", jit=jit, autotune=decorator_factory, heuristics=decorator_factory, Config=Config
    )
    for name in ("triton.language", "triton.language.core"):
        modules[name].constexpr = constexpr  # type: ignore[attr-defined]
    return modules


def _module(name: str, is_package: bool) -> ModuleType:
    module = ModuleType(name, __doc__)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=is_package)
    if is_package:
        module.__path__ = []

    def named(attribute: str) -> _Name:
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return _Name(f"{name}.{attribute}")

    module.__getattr__ = named  # type: ignore[method-assign]
    return module


def install_triton() -> None:
    """Put the stub into `sys.modules`, unless Triton is installed."""
    # Torch caches this answer, and so does not take the stub for a working Triton later.
    from torch.utils._triton import has_triton_package

    if not has_triton_package():
        sys.modules.update(build_stub())
