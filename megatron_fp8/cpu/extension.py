"""Assembles the replacement for `transformer_engine_torch`, TE's compiled extension, from `enums` and `kernels`.

A name without a stand-in can be imported and used in annotations; calling it raises NotImplementedError with its name.
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


class _Missing(type):
    """Metaclass of names without a stand-in: classes, not functions, because TE uses some in annotations
    (`Union[tex.CommOverlap, ...]`) and some as namespaces (`tex.grouped_mlp_experimental.f`)."""

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
    """A kernel runs on the GPU: it takes GPU tensors and makes GPU tensors."""
    if not isinstance(kernel, FunctionType):
        return kernel

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Transformer Engine passes empty tensors, on the host too, for arguments that it leaves out.
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
    """A new module for `sys.modules["transformer_engine_torch"]`. Raises ValueError if two kernel files define a
    name."""
    extension = ModuleType(enums.EXTENSION_NAME, "CPU stand-in for Transformer Engine's compiled extension.")

    def look_up(name: str) -> type:
        # The import system and libraries probe private names, which must fail as usual.
        if name.startswith("_"):
            raise AttributeError(f"module {enums.EXTENSION_NAME!r} has no attribute {name!r}")
        stand_in = _missing(name)
        setattr(extension, name, stand_in)
        return stand_in

    for name, value in vars(enums).items():
        if not name.startswith("_") and getattr(value, "__module__", "") in (enums.__name__, enums.EXTENSION_NAME):
            setattr(extension, name, value)
    for file in pkgutil.iter_modules(kernels.__path__, kernels.__name__ + "."):
        module = importlib.import_module(file.name)
        for name in getattr(module, "__all__", ()):
            if name in vars(extension):
                raise ValueError(f"{name} is defined twice, the second time in {file.name}")
            setattr(extension, name, _on_gpu(name, getattr(module, name)))
    extension.__getattr__ = look_up  # type: ignore[method-assign]
    return extension
