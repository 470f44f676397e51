"""Assembles the module that stands for `transformer_engine_torch`, TE's compiled extension, on CPUs.

Owns how the kernel files make up the extension and what a name without a stand-in does: it can be imported,
looked up and used in annotations, and raises `NotImplementedError` with its name when it is called. Must not
know how any kernel works, and must not import Transformer Engine.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from megatron_fp8.cpu import enums, kernels, memory
from megatron_fp8.cpu.factories import enter_kernel, leave_kernel
from megatron_fp8.cpu.placement import expect_on_gpu

__all__ = ["build_extension"]


class _Missing(type):
    """Class of the classes that stand for extension names without a CPU stand-in.

    They are classes, not functions, because TE names some of them in annotations (`Union[tex.CommOverlap, ...]`)
    and some are name spaces (`tex.grouped_mlp_experimental.f`).
    """

    def __call__(cls, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{enums.EXTENSION_NAME}.{cls.__qualname__} has no CPU stand-in. It runs only with Transformer Engine's"
            " compiled extension on a GPU; choose a layer, recipe or option that does not call it, or add a kernel"
            " in megatron_fp8/cpu/kernels/."
        )

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{cls.__qualname__}.{name}")
        return _missing(f"{cls.__qualname__}.{name}")


def _missing(qualified_name: str) -> type:
    namespace = {"__module__": enums.EXTENSION_NAME, "__qualname__": qualified_name}
    return _Missing(qualified_name.rsplit(".", 1)[-1], (), namespace)


def _on_gpu(name: str, kernel: Any) -> Any:
    """A kernel runs on the GPU: it takes the GPU's tensors, and what it makes is the GPU's."""
    if not isinstance(kernel, FunctionType):
        return kernel

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Of a tensor without elements no kernel reads; Transformer Engine passes such for what it leaves out.
        expect_on_gpu(f"{enums.EXTENSION_NAME}.{name}", *args, *kwargs.values(), empty=False)
        before = enter_kernel()
        try:
            if memory.COUNTER.is_on:
                return memory.COUNTER.kernel(functools.partial(kernel, *args, **kwargs))
            return kernel(*args, **kwargs)
        finally:
            leave_kernel(before)

    return call


def build_extension() -> ModuleType:
    """A new module with TE's enums and every kernel of `megatron_fp8.cpu.kernels`.

    The caller puts it into `sys.modules["transformer_engine_torch"]` before TE is imported.

    Raises ValueError when two kernel files give the same name.
    """
    extension = ModuleType(enums.EXTENSION_NAME, "CPU stand-in for Transformer Engine's compiled extension.")

    def look_up(name: str) -> type:
        # Private names are probes of the import system and of libraries: they must fail as usual.
        if name.startswith("_"):
            raise AttributeError(f"module {enums.EXTENSION_NAME!r} has no attribute {name!r}")
        stand_in = _missing(name)
        setattr(extension, name, stand_in)
        return stand_in

    for name in enums.__all__:
        setattr(extension, name, getattr(enums, name))
    for file in pkgutil.iter_modules(kernels.__path__, kernels.__name__ + "."):
        theme = importlib.import_module(file.name)
        # Files without `__all__` are parts of others.
        for name in getattr(theme, "__all__", ()):
            if name in vars(extension):
                raise ValueError(f"{name} is given twice, the second time by {file.name}")
            setattr(extension, name, _on_gpu(name, getattr(theme, name)))
    extension.__getattr__ = look_up  # type: ignore[method-assign]
    return extension
