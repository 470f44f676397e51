"""Owns the assembly of the module that stands for `transformer_engine_torch`: enums, kernels by theme, and an error
with its name for everything else. Must not know what a kernel computes.
"""

import importlib
import importlib.util
from types import ModuleType
from typing import NoReturn

_NAME = "transformer_engine_torch"
_PARTS = (
    "enums",
    "kernels.activations",
    "kernels.attention",
    "kernels.dropout",
    "kernels.gemm",
    "kernels.library",
    "kernels.multi_tensor",
    "kernels.norms",
    "kernels.quantize",
    "kernels.rope",
    "kernels.scaling",
    "kernels.softmax",
)


def build_extension() -> ModuleType:
    """The stand-in module: what each part lists in `__all__`.

    Every other name is a class that raises NotImplementedError when called: Transformer Engine looks up many names
    when imported that a program never calls. Raises ValueError when two parts supply the same name.
    """
    extension = ModuleType(_NAME, "Transformer Engine's compiled extension, on the CPU.")
    for part in _PARTS:
        if importlib.util.find_spec(f"megatron_fp8.cpu.{part}") is None:
            continue
        module = importlib.import_module(f"megatron_fp8.cpu.{part}")
        for name in module.__all__:
            if hasattr(extension, name):
                raise ValueError(f"{name} is supplied twice, the second time by megatron_fp8.cpu.{part}")
            setattr(extension, name, getattr(module, name))
    extension.__getattr__ = _missing  # type: ignore[method-assign]
    return extension


def _missing(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{_NAME}.{name} has no CPU stand-in. It can be written in megatron_fp8/cpu/kernels/; on a machine with "
            "CUDA, Transformer Engine's own is used"
        )

    return type(name, (), {"__new__": refuse, "__module__": _NAME})
