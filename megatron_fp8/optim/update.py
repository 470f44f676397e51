"""Owns the moment of an optimizer step at which its gradients are ready and nothing has changed yet.

Megatron's `step` makes the gradients ready (FP32, without the loss scale), asks for their global norm, which is the
same on all ranks, then clips and updates. Its answer to the norm's question is the place to leave a step out: later the
masters, moments and step count are changed. It is also the one moment of a step at which the host waits for the device:
all that is to be known of the step is read there, at once. Must not know why a step is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor


@dataclass(frozen=True)
class Update:
    """What became of a step: `grad_norm`, global and before clipping, None where gradients overflowed under the loss
    scale; `made`: whether weights, moments and the step count were changed; `beside`: what was read with the norm."""

    grad_norm: float | None
    made: bool
    beside: tuple[float, ...]


class _LeftOutError(Exception):
    """Ends Megatron's step before it changes anything."""


def update_if(
    optimizer: MegatronOptimizer, beside: Callable[[], Tensor], allowed: Callable[[float, tuple[float, ...]], bool]
) -> Update:
    """Megatron's step, unless the global gradient norm and what is read beside it are not `allowed`.

    `beside`: gives a tensor `[n]` of FP64 on the device that is the same on all ranks, which must all answer alike.
    """
    norm_of = optimizer.get_grad_norm
    norms: list[float] = []
    read: tuple[float, ...] = ()

    def allowed_norm() -> float:
        nonlocal read
        device_values = beside()
        # A tensor on the device, as `beside`; Megatron Core 0.16 has read it already.
        norm = torch.as_tensor(norm_of(), dtype=torch.float64, device=device_values.device)
        first, *others = torch.cat([norm.view(1), device_values]).tolist()
        norms.append(first)
        read = tuple(others)
        if not allowed(first, read):
            raise _LeftOutError
        # A number: with a tensor, which it takes too, Megatron would clip where there is nothing to clip.
        return first

    optimizer.get_grad_norm = allowed_norm
    try:
        succeeded, _, _ = optimizer.step()
    except _LeftOutError:
        return Update(norms[-1], made=False, beside=read)
    finally:
        del optimizer.get_grad_norm
    if not succeeded:
        return Update(None, made=False, beside=read or tuple(beside().tolist()))
    if not norms:
        raise RuntimeError(f"{type(optimizer).__name__}.step did not ask for the gradient norm")
    return Update(norms[-1], made=True, beside=read)
