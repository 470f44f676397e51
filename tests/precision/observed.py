"""What tensors a run really has: operands of its GEMMs, messages of its collectives, activations kept for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

FP8_NAMES = {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2"}
TORCH_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "bytes", "bool": "mask"}


def format_of(tensor: Any) -> str:
    """The name that the chart uses for a tensor's format; `bytes` where only its owner knows."""
    fp8_dtype = getattr(tensor, "_fp8_dtype", None)
    if fp8_dtype is not None:
        return FP8_NAMES[fp8_dtype.name]
    if getattr(tensor, "_hp_data", None) is not None:
        return format_of(tensor._hp_data)
    name = str(tensor.dtype).removeprefix("torch.")
    return TORCH_NAMES.get(name, name)


def observed_gemms(step: Callable[[], Any]) -> Counter:
    """How often `step()` runs each (GEMM, operand, format)."""
    import transformer_engine.pytorch.cpp_extensions.gemm as te_gemm

    seen: Counter = Counter()
    original = te_gemm.tex.generic_gemm

    def spy(A: Any, transa: bool, B: Any, transb: bool, *rest: Any, **named: Any) -> Any:
        gemm, names = {
            (True, False): ("fprop", ("weight", "input")),
            (False, False): ("dgrad", ("weight", "grad")),
            (False, True): ("wgrad", ("input", "grad")),
        }[transa, transb]
        for name, operand in zip(names, (A, B), strict=True):
            seen[gemm, name, format_of(operand)] += 1
        return original(A, transa, B, transb, *rest, **named)

    with patch.object(te_gemm.tex, "generic_gemm", spy):
        step()
    return seen


def observed_collectives(step: Callable[[], Any], groups: Mapping[str, Any]) -> Counter:
    """Bytes by (group's name, collective, format) that `step()` asks for, of whole tensors; single numbers aside.

    A loss goes with the number of its tokens.
    """
    import torch.distributed as dist
    from megatron.core.distributed import param_and_grad_buffer as buffers

    seen: Counter = Counter()
    names = {id(group): name for name, group in groups.items()}

    def spy(collective: str, original: Any, position: int, keyword: str) -> Any:
        def wrapped(*args: Any, **named: Any) -> Any:
            tensor = named[keyword] if keyword in named else args[position]
            group = named.get("group", next((item for item in args if id(item) in names), None))
            if tensor.numel() > 2:
                size = tensor.numel() * tensor.element_size()
                seen[names.get(id(group), "other"), collective, format_of(tensor)] += size
            return original(*args, **named)

        return wrapped

    def sends(*args: Any, **named: Any) -> Any:
        (operations,) = args
        for operation in operations:
            if operation.op is dist.isend:
                size = operation.tensor.numel() * operation.tensor.element_size()
                seen["pp", "send", format_of(operation.tensor)] += size
        return batch(operations)

    batch = dist.batch_isend_irecv
    with ExitStack() as stack:
        for owner, name, collective, position, keyword in (
            (dist, "all_gather_into_tensor", "all-gather", 0, "output_tensor"),
            (dist, "reduce_scatter_tensor", "reduce-scatter", 1, "input"),
            (dist, "all_reduce", "all-reduce", 0, "tensor"),
            (buffers, "dist_all_gather_func", "all-gather", 0, "output_tensor"),
            (buffers, "dist_reduce_scatter_func", "reduce-scatter", 1, "input"),
        ):
            spied = spy(collective, getattr(owner, name), position, keyword)
            stack.enter_context(patch.object(owner, name, spied))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", sends))
        step()
    return seen


def observed_activations(call: Callable[[], Any], known: set[int]) -> dict[int, tuple[str, int]]:
    """(format, bytes) by address of what autograd keeps of `call()` beside the storages `known` (weights, RoPE)."""
    import torch

    kept: dict[int, tuple[str, int]] = {}
    alive = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and storage.nbytes():
            kept[storage.data_ptr()] = (format_of(tensor), storage.nbytes())
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = call()
    del output
    return kept
