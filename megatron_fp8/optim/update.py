"""Owns the moment of an optimizer step at which its gradients are ready and nothing has changed yet.

Megatron's `step` makes the gradients ready (FP32, without the loss scale), asks for their global norm, which waits for
the device and is the same on all ranks, then clips and updates. Its answer to the norm's question is the place to leave
a step out: later the masters, moments and step count are changed. Must not know why a step is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.optimizer import MegatronOptimizer


@dataclass(frozen=True)
class Update:
    """What became of a step: `grad_norm`, global and before clipping, None where gradients overflowed under the loss
    scale; `made`: whether weights, moments and the step count were changed."""

    grad_norm: float | None
    made: bool


class _LeftOutError(Exception):
    """Ends Megatron's step before it changes anything."""


def update_if(optimizer: MegatronOptimizer, allowed: Callable[[float], bool]) -> Update:
    """Megatron's step, unless the global gradient norm is not `allowed`, which all ranks must answer alike."""
    norm_of = optimizer.get_grad_norm
    asked: list[float] = []

    def allowed_norm() -> float:
        asked.append(float(norm_of()))
        if not allowed(asked[-1]):
            raise _LeftOutError
        return asked[-1]

    optimizer.get_grad_norm = allowed_norm
    try:
        succeeded, _, _ = optimizer.step()
    except _LeftOutError:
        return Update(asked[-1], made=False)
    finally:
        del optimizer.get_grad_norm
    if not succeeded:
        return Update(None, made=False)
    if not asked:
        raise RuntimeError(f"{type(optimizer).__name__}.step did not ask for the gradient norm")
    return Update(asked[-1], made=True)
