"""Owns where a tensor lives: on the host or on the emulated GPU, and what is said when the two meet.

Both lie in the same RAM, so the class of a tensor tells them apart: the host's are `HostTensor`s, all others are the
GPU's. Torch calls `HostTensor.__torch_function__` for each operation that is given one, and nothing for operations
between GPU tensors, which therefore cost what they cost without the stand-in, in every thread and in autograd's
backward. Must not know which operations CUDA lets take both (`mixing`), nor where tensors are made (`factories`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_ON_HOST = "_on_host"


class HostTensor(torch.Tensor):
    """A tensor in host memory, pinned or not."""


class HostParameter(HostTensor, torch.nn.Parameter):
    """A parameter in host memory."""


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is the host's; False for the emulated GPU's and for meta tensors. Costs 0.1 microseconds."""
    return isinstance(tensor, HostTensor) or _ON_HOST in tensor.__dict__


def put_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Say that `tensor`, which shares no memory with the GPU's, is the host's. Returns it."""
    kind = type(tensor)
    if kind is torch.Tensor:
        tensor.__class__ = HostTensor
    elif kind is torch.nn.Parameter:
        tensor.__class__ = HostParameter
    elif not issubclass(kind, HostTensor):
        # Transformer Engine's quantised tensors: what they are made of is marked by itself.
        tensor.__dict__[_ON_HOST] = True
    return tensor


def put_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Say that `tensor`, which shares no memory with the host's, is the GPU's. Returns it."""
    kind = type(tensor)
    if kind is HostTensor:
        tensor.__class__ = torch.Tensor
    elif kind is HostParameter:
        tensor.__class__ = torch.nn.Parameter
    else:
        tensor.__dict__.pop(_ON_HOST, None)
    return tensor


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among `values` and in the lists and tuples among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def two_devices(operation: str, index: int = 0) -> RuntimeError:
    """CUDA's error for an operation that was given tensors of the host and of GPU `index`."""
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"cuda:{index} and cpu! (in {operation})"
    )


def expect_on_gpu(operation: str, *values: Any) -> None:
    """Raise CUDA's error where one of the tensors in `values` (nested lists and tuples too) is the host's."""
    for tensor in tensors_in(values):
        if is_on_host(tensor):
            raise two_devices(operation)
