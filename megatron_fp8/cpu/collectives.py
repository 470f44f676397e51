"""gloo instead of NCCL.

torch's gloo has (tested in `tests/cpu`) all collectives of Megatron Core and Transformer Engine, their
`_coalescing_manager` and `batch_isend_irecv` forms, and AVG, BF16 and FP16 reductions. Added here: the name "nccl",
float8 elements and coalesced gathers of several dtypes (as bytes, which is exact), coalescing on a device, and NCCL's
arguments that mean nothing without CUDA (`device_id`, `device_ids`, `pg_options`). What NCCL lacks is refused
(`nccl_groups`).
"""

# ruff: noqa: ARG001  (the signatures are torch's)
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_fp8.cpu.nccl_groups import NcclGroups, is_nccl
from megatron_fp8.cpu.nccl_rules import LOOKS, MESSAGES

# Collectives that only move elements; `nccl_rules` refuses reductions of float8.
_MOVE_NAMES = "all_gather all_gather_coalesced broadcast scatter gather all_to_all all_to_all_single "


def gloo_backend(backend: Any) -> Any:
    """The backend to use for a requested one: "gloo" for "nccl", "cpu:gloo,cuda:nccl" and None, torch's default."""
    return "gloo" if backend is None or is_nccl(backend) else backend


def _as_bytes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.view(torch.uint8) if value.dtype.is_floating_point and value.element_size() == 1 else value
    if isinstance(value, list):
        return [_as_bytes(item) for item in value]
    return value


def _flat_bytes(value: Any) -> Any:
    return value.view(-1).view(torch.uint8) if isinstance(value, torch.Tensor) else value


def _mapped(collective: Callable[..., Any], as_bytes: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return collective(*map(as_bytes, args), **{key: as_bytes(value) for key, value in kwargs.items()})

    return mapped


def _making_groups(original: Callable[..., Any], position: int, note: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """`original` with its backend, possibly at `position`, mapped and NCCL's arguments dropped; calls `note(group,
    requested backend)`."""

    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        for name in ("device_id", "pg_options"):
            kwargs.pop(name, None)
        asked = args[position] if len(args) > position else kwargs.get("backend")
        if len(args) > position:
            args = (*args[:position], gloo_backend(asked), *args[position + 1 :])
        else:
            kwargs["backend"] = gloo_backend(asked)
        group = original(*args, **kwargs)
        note(group, asked)
        return group

    return create


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group=group, async_op=async_op)

    return barrier


def _keeping_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    """`isend` of an alias: gloo sends in the background from the tensor's memory, which Megatron Core frees
    (`deallocate_output_tensor`) right after the call. Under NCCL the stream's order protects it."""

    @functools.wraps(original)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.detach(), *args, **kwargs)

    return isend


def _coalescing_by_list(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_coalescing_manager` without its device, which Transformer Engine names: gloo cannot coalesce on a device, and
    without one torch collects the collectives in a list."""

    @functools.wraps(original)
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        return original(group=group, async_ops=async_ops)

    return manager


def _gloo_extensions() -> dict[str, Callable[..., Any]]:
    """Replacements of functions of `torch.distributed`, by name."""
    replacements: dict[str, Callable[..., Any]] = {
        "barrier": _barrier(dist.barrier),
        "isend": _keeping_memory(dist.isend),
        "_coalescing_manager": _coalescing_by_list(distributed_c10d._coalescing_manager),
    }
    for name in _MOVE_NAMES.split():
        if hasattr(distributed_c10d, name):
            replacements[name] = _mapped(getattr(distributed_c10d, name), _as_bytes)
    # Always as bytes: gloo lays out coalesced gathers in the dtype of the first, without an error, and the distributed
    # optimizer coalesces FP8 and BF16 parameters.
    for name in ("all_gather_into_tensor", "all_gather_single", "_all_gather_base"):
        if hasattr(distributed_c10d, name):
            replacements[name] = _mapped(getattr(distributed_c10d, name), _flat_bytes)
    return replacements


def patch_collectives() -> None:
    """Replace the functions of `torch.distributed` that create groups and communicate."""
    groups, replacements = NcclGroups(), _gloo_extensions()
    for name in (*LOOKS, *MESSAGES):
        function = replacements.get(name, getattr(distributed_c10d, name, None))
        if function is not None:
            replacements[name] = groups.checked(name, function)
    device_of_objects = distributed_c10d._get_object_coll_device
    replacements |= {
        "init_process_group": _making_groups(dist.init_process_group, 0, lambda _, asked: groups.started(asked)),
        "new_group": _making_groups(dist.new_group, 2, groups.add),
        "batch_isend_irecv": groups.batched(dist.batch_isend_irecv),
        "is_nccl_available": lambda: True,
        "_get_object_coll_device": lambda group=None: groups.device_of_objects(group, device_of_objects(group)),
    }
    for name, replacement in replacements.items():
        for module in (dist, distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, replacement)
