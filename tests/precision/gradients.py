"""Gradients of a test's own choosing, put in where Megatron reduces them: after the backward pass of every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def before_reduction(parts: Any, change: Callable[[], None]) -> None:
    """Call `change()` on this rank in every step, when its gradients are whole but not yet reduced or scaled."""
    _wrap(parts, before=change)


def after_reduction(parts: Any, change: Callable[[], None]) -> None:
    """Call `change()` in every step when gradients are reduced and divided, and the optimizer has not seen them."""
    _wrap(parts, after=change)


def _wrap(parts: Any, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None) -> None:
    config = parts.chunks[0].config
    finalize = config.finalize_model_grads_func

    def wrapped(*arguments: Any, **keywords: Any) -> None:
        before()
        finalize(*arguments, **keywords)
        after()

    config.finalize_model_grads_func = wrapped


def whole_state(parts: Any) -> dict[str, Any]:
    """Copies of all that an optimizer step may change: weights, masters, moments, step counts."""
    import torch

    state: dict[str, Any] = {f"weight {i}": p.detach().clone() for i, p in enumerate(parameters(parts))}
    fused = parts.optimizer.optimizer
    for i, group in enumerate(fused.param_groups):
        state[f"step {i}"] = torch.tensor(group.get("step", 0))
        for j, master in enumerate(group["params"]):
            state[f"master {i} {j}"] = master.detach().clone()
            for name, value in fused.state[master].items():
                state[f"{name} {i} {j}"] = value.clone()
    return state


def parameters(parts: Any) -> list[Any]:
    """This rank's parameters, in order."""
    return [parameter for chunk in parts.chunks for parameter in chunk.parameters()]
