"""Owns what an operation with host tensors does: it refuses what CUDA refuses, and its results are the host's.

Torch calls `HostTensor.__torch_function__` for each operation that is given one, and nothing for operations among GPU
tensors, which therefore cost what they cost without the stand-in. It is a matter of the tensor, so it holds in every
thread and in autograd's backward. Must not know which mixtures CUDA takes (`mixing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_fp8.cpu import generators, mixing, streams, transfers
from megatron_fp8.cpu.placement import HostTensor, is_on_host, put_on_host, real_device, tensors_in

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _backward(
    tensor: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    # Not within `_operate`, which is blind to operations within an operation.
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _attribute(getter: Callable[..., Any], *args: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        result = getter(*args)
    return put_on_host(result) if type(result) in _PLAIN else result


def _operate(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    given = list(tensors_in((*args, *kwargs.values())))
    name = mixing.operation_name(func)
    if transfers.PENDING:
        transfers.refuse_unfinished(name, given, mixing.written(name, args, kwargs))
    gpu = [tensor for tensor in given if not is_on_host(tensor) and real_device(tensor).type == "cpu"]
    if gpu:
        host = [tensor for tensor in given if is_on_host(tensor)]
        message = mixing.refusal(name, args, kwargs, host, gpu)
        if message is not None:
            raise RuntimeError(message)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs) if gpu else generators.call_on_host(name, func, args, kwargs)
    if name == "copy_" and gpu:
        _note_copy(*args, **kwargs)
    if isinstance(result, (torch.Tensor, list, tuple)) and (not gpu or (mixing.stays(name) and is_on_host(given[0]))):
        for tensor in tensors_in((result,)):
            if type(tensor) in _PLAIN and real_device(tensor).type == "cpu" and not any(tensor is each for each in gpu):
                put_on_host(tensor)
    return result


def _note_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
    stream = streams.current_stream()
    host = target if is_on_host(target) else source
    if not non_blocking:
        transfers.finish(transfers.on_stream(stream))
    elif transfers.is_pinned(host):
        transfers.start(host, host is target, stream)


def patch_operations() -> None:
    """From now on operations on host tensors are looked at."""

    def look(
        cls: type,  # noqa: ARG001
        func: Callable[..., Any],
        types: Any,  # noqa: ARG001
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return _attribute(func, *args)
        if func is backward:
            return _backward(*args, **(kwargs or {}))
        return _operate(func, args, kwargs or {})

    backward = torch.Tensor.backward
    HostTensor.__torch_function__ = classmethod(look)  # type: ignore[assignment,method-assign]
