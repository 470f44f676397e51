"""What a rank of a real run holds: tensors between two steps, and what autograd keeps at its fullest moment."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

from tests.small_run import batches


def held_by_rank(parts: Any) -> dict[str, int]:
    """Bytes of a rank after a step: `kept` between steps; in the step after, when a forward pass ends and autograd
    keeps most, `for backward` of these, and `at most` all together."""
    kept = tensors_in_python()
    for_backward, at_most = fullest_moment(parts, set(kept))
    return {"kept": sum(kept.values()), "for backward": for_backward, "at most": at_most}


def tensors_in_python() -> dict[int, int]:
    """Bytes by address of every storage on the device that a tensor in Python refers to, whatever refers to that."""
    import torch

    gc.collect()
    found: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in gc.get_objects():
            # By class: an instance check would run code of objects that pretend to be something else.
            if not issubclass(type(thing), torch.Tensor) or not thing.is_cuda:
                continue
            storage = thing.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def fullest_moment(parts: Any, known: set[int]) -> tuple[int, int]:
    """Bytes of the storages beside the `known` that autograd keeps when a forward pass ends, at the worst of them; and
    of all storages then."""
    import torch

    saved: list[weakref.ref] = []
    most = (0, 0)

    def pack(tensor: Any) -> Any:
        saved.append(weakref.ref(tensor))
        return tensor

    def look(*_: Any) -> None:
        nonlocal most
        alive = [tensor for tensor in (reference() for reference in saved) if tensor is not None]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}
        size = sum(size for address, size in storages.items() if address not in known)
        if size > most[0]:
            most = size, sum({**tensors_in_python(), **storages}.values())

    hooks = [chunk.module.register_forward_hook(look) for chunk in parts.chunks]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
    for hook in hooks:
        hook.remove()
    return most


def peak_of_step(parts: Any) -> int:
    """Most bytes of tensors during a step, as the device counts them."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
    return torch.cuda.max_memory_allocated()
