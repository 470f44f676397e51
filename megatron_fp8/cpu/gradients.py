"""Gradients of host tensors are the host's: autograd makes them in C++, where nobody says whose they are.

What a hook of a host tensor is given is not covered and counts as the GPU's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_fp8.cpu.placement import HostTensor, is_on_host, put_on_host, tensors_in


def _of_the_host(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    # Other names for them: a gradient of the GPU may be the same tensor.
    return tuple(each.as_subclass(HostTensor) if type(each) is torch.Tensor else each for each in gradients)


def patch_gradients() -> None:
    """Mark what `torch.autograd.grad` returns, and what functions on host tensors get for their backward."""
    grad = torch.autograd.grad
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    @functools.wraps(grad)
    def gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        found = grad(outputs, inputs, *args, **kwargs)
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
