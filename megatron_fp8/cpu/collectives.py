"""gloo in the place of NCCL.

What gloo of this torch already has (checked in `tests/cpu`): every collective of Megatron Core's and
Transformer Engine's, their `_coalescing_manager` and `batch_isend_irecv` forms, AVG, BF16 and FP16
reductions. What it lacks and this file adds: the name "nccl", float8 elements and gathers of several element types
at once (moved as bytes, which is exact), groups of collectives on a device, and NCCL's arguments that have no meaning
without CUDA (`device_id`, `device_ids`, `pg_options`). What NCCL lacks is refused in its groups (`nccl_groups`).
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

# Collectives that only move elements; reductions of float8 are refused in `nccl_rules`.
_MOVE_NAMES = "all_gather all_gather_coalesced broadcast scatter gather all_to_all all_to_all_single "


def gloo_backend(backend: Any) -> Any:
    """The backend to use for what the program asked: "nccl" and "cpu:gloo,cuda:nccl" become "gloo", and so does None,
    by which torch takes both for the first group, and that one's for others."""
    return "gloo" if backend is None or is_nccl(backend) else backend


def _as_bytes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.view(torch.uint8) if value.dtype.is_floating_point and value.element_size() == 1 else value
    if isinstance(value, list):
        return [_as_bytes(item) for item in value]
    return value


def _gathering_bytes(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Gather into one tensor, always as bytes: of several in one group gloo lays all out in the type of the first,
    without an error. The distributed optimizer gathers FP8 and BF16 parameters together."""

    def as_bytes(value: Any) -> Any:
        return value.view(-1).view(torch.uint8) if isinstance(value, torch.Tensor) else value

    @functools.wraps(collective)
    def gather(*args: Any, **kwargs: Any) -> Any:
        return collective(*map(as_bytes, args), **{key: as_bytes(value) for key, value in kwargs.items()})

    return gather


def _moving_bytes(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def move(*args: Any, **kwargs: Any) -> Any:
        return collective(*map(_as_bytes, args), **{key: _as_bytes(value) for key, value in kwargs.items()})

    return move


def _making_groups(original: Callable[..., Any], position: int, note: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """`original` with its backend (also at `position`) mapped and NCCL's own arguments dropped; `note` is told the
    group and the backend that was asked for."""

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
    """`isend` of an alias: gloo sends in the background from the tensor's memory, which Megatron Core gives back
    (`deallocate_output_tensor`) as soon as the send is asked for. Under NCCL the stream's order protects it."""

    @functools.wraps(original)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.detach(), *args, **kwargs)

    return isend


def _coalescing_by_list(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_coalescing_manager` that collects the collectives in a list: gloo has no start and end of a group on a device,
    which Transformer Engine asks for by naming the device."""

    @functools.wraps(original)
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        return original(group=group, async_ops=async_ops)

    return manager


def _with_what_gloo_lacks() -> dict[str, Callable[..., Any]]:
    """Functions of `torch.distributed` by name."""
    replacements: dict[str, Callable[..., Any]] = {
        "barrier": _barrier(dist.barrier),
        "isend": _keeping_memory(dist.isend),
        "_coalescing_manager": _coalescing_by_list(distributed_c10d._coalescing_manager),
    }
    for name in _MOVE_NAMES.split():
        if hasattr(distributed_c10d, name):
            replacements[name] = _moving_bytes(getattr(distributed_c10d, name))
    for name in ("all_gather_into_tensor", "all_gather_single", "_all_gather_base"):
        if hasattr(distributed_c10d, name):
            replacements[name] = _gathering_bytes(getattr(distributed_c10d, name))
    return replacements


def patch_collectives() -> None:
    """Replace the functions of `torch.distributed` that make groups and communicate, and what it says of NCCL."""
    groups, replacements = NcclGroups(), _with_what_gloo_lacks()
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
