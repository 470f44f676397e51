"""`torch.device`, `torch.Generator` and typed tensor classes on a machine without CUDA.

Each is replaced by a class that creates objects of the original, so `isinstance`, annotations, pickles and torch's
tables keep working.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_fp8.cpu.factories import (
    cuda_device,
    default_device,
    exchange_default_device,
    is_cuda_device,
    is_host_device,
    place,
)
from megatron_fp8.cpu.generators import Generator
from megatron_fp8.cpu.placement import is_on_host, put_on_host

_TYPED = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")


class _StandsFor(type):
    """Metaclass of a class that creates objects of `original` and compares equal to it."""

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
    namespace = {"original": original, "__new__": make, "__module__": "torch", "__doc__": original.__doc__}
    return _StandsFor(original.__name__, (), namespace)


def patch_classes() -> None:
    """Replace `torch.device`, `torch.Generator` and what `with torch.device("cuda")` enters."""
    make_device = torch.device

    def new_device(cls: type, *args: Any, **kwargs: Any) -> torch.device:  # noqa: ARG001
        # An index alone means the accelerator, which C++ does not find.
        if len(args) == 1 and not kwargs and is_cuda_device(args[0]) and isinstance(args[0], int):
            return make_device("cuda", args[0])
        return make_device(*args, **kwargs)

    def new_generator(cls: type, device: Any = "cpu") -> torch.Generator:  # noqa: ARG001
        if not (is_cuda_device(device) or is_host_device(device)):
            return torch._C.Generator(device)
        generator = Generator()
        generator.on_gpu = is_cuda_device(device)
        return generator

    _patch_default_device()
    torch.device = _stand_for(make_device, new_device)  # type: ignore[misc]
    torch.Generator = _stand_for(torch._C.Generator, new_generator)  # type: ignore[misc]
    for name in _TYPED:
        setattr(torch.cuda, f"{name}Tensor", _typed(getattr(torch, f"{name}Tensor"), on_host=False))
        setattr(torch, f"{name}Tensor", _typed(getattr(torch, f"{name}Tensor"), on_host=True))
    _patch_tensor_class()


def _patch_tensor_class() -> None:
    """`torch.Tensor(...)` creates host tensors."""
    new_tensor = torch.Tensor.__new__

    # No named parameter: torch's compiler compares signatures with its substitute's.
    def new(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = new_tensor(*args, **kwargs)
        return put_on_host(made) if args[0] is torch.Tensor and made.device.type == "cuda" else made

    torch.Tensor.__new__ = staticmethod(new)  # type: ignore[method-assign,assignment]


def _typed(original: Any, on_host: bool) -> Any:
    """`torch.FloatTensor` and the like: the old way to create a tensor, and to check its type and device."""

    class Typed(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original) and is_on_host(instance) == on_host

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    def new(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG001
        return place(original(*args, **kwargs), on_host)

    return Typed(original.__name__, (), {"__new__": new, "__module__": "torch" if on_host else "torch.cuda"})


def _patch_default_device() -> None:
    """`with torch.device(...)` and `torch.set_default_device`: factories read the default, so no mode is needed."""
    from torch.utils import _device

    enter, leave = _device.DeviceContext.__enter__, _device.DeviceContext.__exit__

    def is_ours(self: _device.DeviceContext) -> bool:
        return is_cuda_device(self.device) or is_host_device(self.device)

    def enter_ours(self: _device.DeviceContext) -> _device.DeviceContext:
        if not is_ours(self):
            enter(self)
        self.__dict__.setdefault("before", []).append(exchange_default_device(self.device))
        return self

    def leave_ours(self: _device.DeviceContext, *exc: Any) -> None:
        exchange_default_device(self.__dict__["before"].pop())
        if not is_ours(self):
            leave(self, *exc)

    def get_default_device() -> torch.device:
        device = default_device()
        if device is None:
            return torch.device("cpu")
        return cuda_device() if is_cuda_device(device) and device.index is None else device

    _device.DeviceContext.__enter__ = enter_ours  # type: ignore[method-assign]
    _device.DeviceContext.__exit__ = leave_ours  # type: ignore[method-assign]
    torch.get_default_device = get_default_device
