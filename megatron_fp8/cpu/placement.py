"""Owns where a tensor lives: on the host or on the emulated GPU, and what is said where the two must not meet.

Both lie in the same RAM, so the class of a tensor tells them apart: the host's are `HostTensor`s, all others are the
GPU's. Must not know what operations do with the two (`operations`), nor where tensors are made (`factories`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Marks what is on the host and keeps a class of its own: Transformer Engine's quantized tensors.
ON_HOST = "_on_host"
_HOST = torch.device("cpu")
# Torch's own answer: "cpu" for the host's and the GPU's. Not for host tensors: torch asks their class for attributes.
unplaced_device: Callable[[torch.Tensor], torch.device] = torch._C.TensorBase.device.__get__


class HostTensor(torch.Tensor):
    """A tensor in host memory, pinned or not."""

    device = property(lambda self: _HOST)  # noqa: ARG005
    is_cuda = property(lambda self: False)  # noqa: ARG005
    is_cpu = property(lambda self: True)  # noqa: ARG005

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As torch's own class: a file says nothing of this one.
        with torch._C.DisableTorchFunctionSubclass():
            return self._reduce_ex_internal(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            found: torch.Tensor = memo[id(self)]
            return found
        put_on_gpu(self)
        try:
            copy = torch.Tensor.__deepcopy__(self, memo)
        finally:
            put_on_host(self)
        return put_on_host(copy)

    def __repr__(self) -> str:  # type: ignore[override]
        # Torch's text begins with the name of a subclass, and names the device of all that is not the host's.
        put_on_gpu(self)
        try:
            text: str = torch._tensor_str._str(self)
        finally:
            put_on_host(self)
        return re.sub(r", device='cuda:\d+'", "", text)


class HostParameter(HostTensor, torch.nn.Parameter):
    """A parameter in host memory."""

    __deepcopy__ = torch.nn.Parameter.__deepcopy__
    __reduce_ex__ = torch.nn.Parameter.__reduce_ex__

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> HostParameter:
        made: HostParameter = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, requires_grad)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return "Parameter containing:\n" + HostTensor.__repr__(self)


def real_device(tensor: torch.Tensor) -> torch.device:
    """Where the memory of `tensor` is: "cpu" for the host's and the emulated GPU's, else "meta" or the like."""
    if isinstance(tensor, HostTensor):
        return _HOST
    device = unplaced_device(tensor)
    # Under a mode (`with torch.device(...)`) torch asks the class here, too.
    return _HOST if device.type == "cuda" else device


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is the host's; False for the emulated GPU's and for meta tensors. Costs 0.1 microseconds."""
    return isinstance(tensor, HostTensor) or ON_HOST in tensor.__dict__


def put_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Say that `tensor`, which shares no memory with the GPU's, is the host's. Returns it."""
    kind = type(tensor)
    if kind is torch.Tensor:
        tensor.__class__ = HostTensor
    elif kind is torch.nn.Parameter:
        tensor.__class__ = HostParameter
    elif not issubclass(kind, HostTensor):
        # Transformer Engine's quantized tensors: what they are made of is marked by itself.
        tensor.__dict__[ON_HOST] = True
    return tensor


def put_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Say that `tensor`, which shares no memory with the host's, is the GPU's. Returns it."""
    kind = type(tensor)
    if kind is HostTensor:
        tensor.__class__ = torch.Tensor
    elif kind is HostParameter:
        tensor.__class__ = torch.nn.Parameter
    else:
        tensor.__dict__.pop(ON_HOST, None)
    return tensor


def put(tensor: torch.Tensor, on_host: bool) -> torch.Tensor:
    """`put_on_host` or `put_on_gpu`."""
    return put_on_host(tensor) if on_host else put_on_gpu(tensor)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among `values` and in the lists and tuples among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def parts_of(value: Any) -> list[Any]:
    """What a quantized tensor or a quantizer of Transformer Engine consists of, as far as that is in memory."""
    if hasattr(value, "_quantizer"):
        return [getattr(value, name, None) for name, _ in value._INNER_TENSORS]
    if hasattr(value, "rowwise_usage"):
        return [getattr(value, name, None) for name in ("scale", "amax")]
    return []


def two_devices(operation: str, index: int = 0) -> RuntimeError:
    """CUDA's error for an operation that was given tensors of the host and of GPU `index`."""
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"cuda:{index} and cpu! (in {operation})"
    )


def expect_on_gpu(operation: str, *values: Any, empty: bool = True) -> None:
    """Raise CUDA's error where one of the tensors in `values` is the host's: in nested lists and tuples too, and among
    what Transformer Engine's quantized tensors are made of. `empty`: those without elements, too."""
    for position, value in enumerate(values):
        if isinstance(value, (torch.Tensor, list, tuple)):
            for tensor in tensors_in((value,)):
                if is_on_host(tensor) and (empty or tensor.numel()):
                    raise two_devices(f"argument {position} of {operation}")
        parts = parts_of(value)
        if parts:
            expect_on_gpu(f"argument {position} of {operation}", *parts, empty=empty)
