"""Keeps host and GPU tensors apart through autograd and through `torch.save` and `torch.load`.

A gradient lives where its tensor does; autograd makes it in C++, which cannot tell the two apart. A root gradient on
the wrong device is refused as autograd refuses it, unless it has no dimensions. Not covered: what hooks of host tensors
receive, and what hooks and `Function.backward` return, count as GPU tensors. Files record the device of each storage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_fp8.cpu import streams
from megatron_fp8.cpu.factories import cuda_device, is_cuda_device, place
from megatron_fp8.cpu.placement import HostTensor, is_on_host, put_on_host, real_device, tensors_in


def _of_the_host(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    # Aliases: a GPU gradient may be the same tensor.
    return tuple(each.as_subclass(HostTensor) if type(each) is torch.Tensor else each for each in gradients)


def _expect(gradient: Any, index: int, on_host: bool) -> None:
    """Raise autograd's error if the root gradient number `index` is on the wrong device."""
    if not isinstance(gradient, torch.Tensor) or is_on_host(gradient) == on_host or gradient.dim() == 0:
        return
    if real_device(gradient).type == "cpu":
        wanted, found = ("cpu", gradient.device) if on_host else (f"cuda:{streams.current_device()}", "cpu")
        raise RuntimeError(f"invalid gradient at index {index} - expected device {wanted} but got {found}")


def _expect_roots(outputs: Any, gradients: Any) -> None:
    given = (gradients,) if isinstance(gradients, torch.Tensor) else gradients or ()
    roots = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    for index, (root, gradient) in enumerate(zip(roots, given, strict=False)):
        if isinstance(root, torch.Tensor):
            _expect(gradient, index, is_on_host(root))


def _patch_roots() -> None:
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def passed(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if grad_tensors is not None:
            _expect_roots(tensors, grad_tensors)
        backward(tensors, grad_tensors, *args, **kwargs)

    torch.autograd.backward = passed


def patch_gradients() -> None:
    """Check root gradients, and mark what `torch.autograd.grad` returns and what `Function.backward` receives."""
    _patch_roots()
    grad = torch.autograd.grad
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    @functools.wraps(grad)
    def gradients(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if grad_outputs is not None:
            _expect_roots(outputs, grad_outputs)
        found = grad(outputs, inputs, grad_outputs, *args, **kwargs)
        for tensor, gradient in zip(tensors_in((inputs,)), found, strict=True):
            if gradient is not None and is_on_host(tensor):
                put_on_host(gradient)
        return found

    @functools.wraps(apply)
    def apply_(cls: type, *args: Any, **kwargs: Any) -> Any:
        results = apply(cls, *args, **kwargs)
        if any(isinstance(each, HostTensor) for each in args):
            for result in tensors_in((results,)):
                if is_on_host(result) and result.grad_fn is not None:
                    result.grad_fn.register_prehook(_of_the_host)
                    break
        return results

    torch.autograd.grad = gradients  # type: ignore[assignment]
    torch.autograd.Function.apply = classmethod(apply_)  # type: ignore[method-assign,assignment]


_ON_GPU = "_on_gpu"
# Before torch's own, which take every storage in RAM to be on the host.
_PRIORITY = 5


def _untyped(storage: Any) -> torch.UntypedStorage:
    return getattr(storage, "_untyped_storage", storage)


def _tag(storage: Any) -> str | None:
    return str(cuda_device()) if _ON_GPU in getattr(_untyped(storage), "__dict__", ()) else None


def _restore(storage: Any, location: str) -> Any:
    """The storage, marked as the GPU's if `location` is one; else None."""
    if not is_cuda_device(location):
        return None
    _untyped(storage).__dict__[_ON_GPU] = True
    return storage


def _wanted(location: Any) -> Any:
    # Torch converts other types than str to a device, for which C++ would look for the driver.
    if isinstance(location, torch.device):
        return str(location)
    return f"cuda:{location}" if is_cuda_device(location) and isinstance(location, int) else location


def patch_saving() -> None:
    """Mark storages when tensors are serialized, and tensors when they are rebuilt."""
    reduce = torch.Tensor._reduce_ex_internal
    rebuild: Callable[..., torch.Tensor] = torch._utils._rebuild_tensor
    original_load = torch.load

    def reduce_ex_internal(self: torch.Tensor, protocol: Any) -> Any:
        if real_device(self).type == "cpu" and not hasattr(self, "_quantizer") and self.layout is torch.strided:
            marks = self.untyped_storage().__dict__
            if is_on_host(self):
                marks.pop(_ON_GPU, None)
            else:
                marks[_ON_GPU] = True
        return reduce(self, protocol)

    def rebuild_tensor(storage: Any, *args: Any) -> torch.Tensor:
        tensor = rebuild(storage, *args)
        if real_device(tensor).type != "cpu":
            return tensor
        return place(tensor, on_host=_ON_GPU not in _untyped(storage).__dict__)

    @functools.wraps(original_load)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original_load(f, _wanted(map_location), *args, **kwargs)

    torch.Tensor._reduce_ex_internal = reduce_ex_internal  # type: ignore[method-assign]
    torch._utils._rebuild_tensor = rebuild_tensor
    torch.load = load
    torch.serialization.register_package(_PRIORITY, _tag, _restore)
