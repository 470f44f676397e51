"""Gradients are where their tensors are: autograd makes them in C++, where nobody says whose they are.

One from elsewhere that a backward pass is to begin with is refused as autograd refuses it; one without dimensions is
moved, as there. What a hook of a host tensor is given is not covered and counts as the GPU's, as is what hooks and a
function's `backward` return.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_fp8.cpu import streams
from megatron_fp8.cpu.placement import HostTensor, is_on_host, put_on_host, real_device, tensors_in


def _of_the_host(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    # Other names for them: a gradient of the GPU may be the same tensor.
    return tuple(each.as_subclass(HostTensor) if type(each) is torch.Tensor else each for each in gradients)


def _expect(gradient: Any, index: int, on_host: bool) -> None:
    """Raise autograd's error where `gradient`, the number `index` of those given, is not where it belongs."""
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
    """Mark what `torch.autograd.grad` returns, and what functions on host tensors get for their backward; look at what
    backward passes begin with."""
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
