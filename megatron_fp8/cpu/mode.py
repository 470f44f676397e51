"""Makes the CPU look like a host with a GPU beside it, for programs that were written for GPUs.

`install` maps what is asked of a GPU to the CPU. A program may also look at what it got
(`tensor.device.type`), and may rely on a move between host and GPU being a copy. Here each tensor is
remembered as the host's or the GPU's, and answers accordingly. A TorchFunctionMode follows them through the
operations, which costs microseconds for each: the training of this project runs without it.

Which tensors are the host's: those made without a device or on "cpu", and results of operations on only such.
All others are the GPU's, those too that are made where no mode looks (inside autograd's backward, in C++).
Mixing the two in one operation, an error on a GPU, is let pass.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from megatron_fp8.cpu import streams
from megatron_fp8.cpu.factories import ON_CUDA, is_cuda_device


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class HostAndGpu(TorchFunctionMode):
    """Remembers which tensors are the host's."""

    def __init__(self, move: Callable[..., torch.Tensor]) -> None:
        """`move` is torch's own `Tensor.to`."""
        super().__init__()
        self._host = WeakIdKeyDictionary()
        self._move = move
        self._set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]

    def is_host(self, tensor: torch.Tensor) -> bool:
        return tensor in self._host

    def mark(self, tensor: torch.Tensor, host: bool) -> None:
        if host:
            self._host[tensor] = True
        else:
            self._host.pop(tensor, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to or func is self._move:
            return self._moved(*args, **kwargs)
        result = func(*args, **kwargs)
        if func == self._set_data:
            self.mark(args[0], self.is_host(args[1]))
        elif isinstance(result, (torch.Tensor, list, tuple)):
            self._follow(result, args, kwargs)
        return result

    def _follow(self, result: Any, args: Any, kwargs: dict[str, Any]) -> None:
        inputs = list(_tensors((*args, *kwargs.values())))
        device = kwargs.get("device")
        if device is not None:
            host = device is not ON_CUDA
        elif inputs:
            host = all(self.is_host(tensor) for tensor in inputs)
        else:
            host = _device.CURRENT_DEVICE is not ON_CUDA
        for tensor in _tensors((result,)):
            if not any(tensor is given for given in inputs):
                self.mark(tensor, host)

    def _moved(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = args[0] if args else kwargs.get("device", kwargs.get("other"))
        from_host = self.is_host(tensor)
        if isinstance(target, torch.Tensor):
            to_host = self.is_host(target)
        elif isinstance(target, (torch.device, str)):
            to_host = target is not ON_CUDA and torch.device(target).type == "cpu"
        else:
            to_host = from_host
        if from_host != to_host and len(args) < 4:
            kwargs["copy"] = True
        result = self._move(tensor, *args, **kwargs)
        if result is not tensor:
            self.mark(result, to_host)
        return result


def _patch_properties(mode: HostAndGpu) -> None:
    real_device = torch.Tensor.device.__get__

    def device(self: torch.Tensor) -> torch.device:
        real = real_device(self)
        if real.type != "cpu" or mode.is_host(self):
            return real
        return torch.device("cuda", streams.current_device())

    torch.Tensor.device = property(device)  # type: ignore[assignment]
    torch.Tensor.is_cuda = property(lambda self: self.device.type == "cuda")  # type: ignore[assignment]
    torch.Tensor.is_cpu = property(lambda self: self.device.type == "cpu")  # type: ignore[assignment]


def _patch_makers(mode: HostAndGpu) -> None:
    """Functions that make tensors unseen by a TorchFunctionMode."""

    def on_host(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = function(*args, **kwargs)
            mode.mark(tensor, host=True)
            return tensor

        return make

    for name in ("from_numpy", "frombuffer"):
        setattr(torch, name, on_host(getattr(torch, name)))

    original_load = torch.load

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            loaded = original_load(f, map_location, *args, **kwargs)
        host = map_location is not None and not is_cuda_device(map_location)
        for leaf in tree_iter(loaded):
            if isinstance(leaf, torch.Tensor):
                mode.mark(leaf, host)
        return loaded

    torch.load = load
    make_subclass = torch.Tensor._make_subclass

    # Torch compares this signature with its own substitute's.
    def parameter(cls: type, data: torch.Tensor, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = make_subclass(cls, data, requires_grad, **kwargs)
        mode.mark(made, mode.is_host(data))
        return made

    torch.Tensor._make_subclass = staticmethod(parameter)  # type: ignore[method-assign,assignment]


def _patch_questions() -> None:
    original_default = torch.get_default_device

    def get_default_device() -> torch.device:
        default = original_default()
        return torch.device("cuda", streams.current_device()) if default is ON_CUDA else default

    torch.get_default_device = get_default_device


def _unseen(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel runs on the GPU: what it makes on the way and returns is the GPU's."""

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return kernel(*args, **kwargs)

    return call


def _patch_kernels(extension: ModuleType) -> None:
    for name, kernel in list(vars(extension).items()):
        if isinstance(kernel, FunctionType) and not name.startswith("_"):
            setattr(extension, name, _unseen(kernel))


def activate() -> None:
    """Switch the whole process to host-and-GPU answers, for good. Needs `install()`.

    Raises RuntimeError when called twice.
    """
    if isinstance(torch.Tensor.device, property):
        raise RuntimeError("megatron_fp8.cpu.mode.activate() was called twice in one process")
    mode = HostAndGpu(torch.Tensor.to.__wrapped__)  # type: ignore[attr-defined]
    _patch_properties(mode)
    _patch_makers(mode)
    _patch_questions()
    _patch_kernels(sys.modules["transformer_engine_torch"])
    mode.__enter__()
