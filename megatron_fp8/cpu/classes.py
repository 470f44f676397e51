"""Classes of torch that are made for a device, on a machine without CUDA: `torch.device` and `torch.Generator`.

Each is replaced by a class that makes objects of the original: `isinstance`, annotations, pickles and torch's own
tables keep working with it.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_fp8.cpu.factories import ON_CUDA, host_device, is_cuda_device


class _StandsFor(type):
    """Class of a class that answers as `original`, whose objects it makes."""

    original: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.original

    def __hash__(cls) -> int:
        return hash(cls.original)


def _stand_for(original: type, make: Any) -> Any:
    namespace = {
        "original": original,
        "__new__": make,
        "__module__": "torch",
        "__qualname__": original.__name__,
        "__doc__": original.__doc__,
    }
    return _StandsFor(original.__name__, (), namespace)


def patch_classes() -> None:
    """Replace `torch.device`, `torch.Generator` and what `with torch.device("cuda")` enters."""
    make_device, make_generator = torch.device, torch.Generator

    def new_device(cls: type, *args: Any, **kwargs: Any) -> torch.device:  # noqa: ARG001
        # An index alone means the accelerator, which C++ does not find here.
        if len(args) == 1 and not kwargs and is_cuda_device(args[0]) and isinstance(args[0], int):
            return make_device("cuda", args[0])
        return make_device(*args, **kwargs)

    def new_generator(cls: type, device: Any = "cpu") -> torch.Generator:  # noqa: ARG001
        return make_generator(host_device(device))

    _patch_default_device()
    torch.device = _stand_for(make_device, new_device)  # type: ignore[misc]
    torch.Generator = _stand_for(make_generator, new_generator)  # type: ignore[misc]


def _patch_default_device() -> None:
    from torch.utils import _device

    original_init = _device.DeviceContext.__init__

    def init(self: _device.DeviceContext, device: Any) -> None:
        original_init(self, host_device(device))
        if is_cuda_device(device):
            self.device = ON_CUDA

    _device.DeviceContext.__init__ = init  # type: ignore[method-assign]
