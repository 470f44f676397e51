"""Whether a tensor is on the host or on the emulated GPU.

Both are in RAM, so a tensor's class tells: host tensors are `HostTensor`s, all others are on the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Marks host tensors that keep their own class: Transformer Engine's quantized tensors.
ON_HOST = "_on_host"
_HOST = torch.device("cpu")
# Torch's own device: "cpu" for both. Not for host tensors, whose attributes torch looks up in their class.
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
        # Torch's text starts with the name of a subclass, and names any device but the host.
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
    """The device of the memory of `tensor`: "cpu" for the host and the emulated GPU, else "meta" or the like."""
    if isinstance(tensor, HostTensor):
        return _HOST
    device = unplaced_device(tensor)
    # Under a mode (`with torch.device(...)`) torch calls the class's property here, too.
    return _HOST if device.type == "cuda" else device


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is on the host; False for GPU and meta tensors. Costs 0.1 microseconds."""
    return isinstance(tensor, HostTensor) or ON_HOST in tensor.__dict__


def put_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Mark `tensor`, which must share no memory with GPU tensors, as on the host, and return it."""
    kind = type(tensor)
    if kind is torch.Tensor:
        tensor.__class__ = HostTensor
    elif kind is torch.nn.Parameter:
        tensor.__class__ = HostParameter
    elif not issubclass(kind, HostTensor):
        # Transformer Engine's quantized tensors, whose inner tensors are marked separately.
        tensor.__dict__[ON_HOST] = True
    return tensor


def put_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Mark `tensor`, which must share no memory with host tensors, as on the GPU, and return it."""
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
    """The inner tensors of a Transformer Engine quantized tensor or quantizer."""
    if hasattr(value, "_quantizer"):
        return [getattr(value, name, None) for name, _ in value._INNER_TENSORS]
    if hasattr(value, "rowwise_usage"):
        return [getattr(value, name, None) for name in ("scale", "amax")]
    return []


def two_devices(operation: str, index: int = 0) -> RuntimeError:
    """CUDA's error for an operation on both host and GPU tensors."""
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"cuda:{index} and cpu! (in {operation})"
    )


def expect_on_gpu(operation: str, *values: Any, empty: bool = True) -> None:
    """Raise CUDA's error if a tensor in `values`, nested lists and tuples, or Transformer Engine's quantized tensors is
    on the host. `empty`: even one without elements."""
    for position, value in enumerate(values):
        if isinstance(value, (torch.Tensor, list, tuple)):
            for tensor in tensors_in((value,)):
                if is_on_host(tensor) and (empty or tensor.numel()):
                    raise two_devices(f"argument {position} of {operation}")
        parts = parts_of(value)
        if parts:
            expect_on_gpu(f"argument {position} of {operation}", *parts, empty=empty)
