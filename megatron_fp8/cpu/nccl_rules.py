"""What NCCL, as torch calls it, refuses, and what each call of `torch.distributed` passes to it.

Sources: torch 2.13's `NCCLUtils.hpp` (supported dtypes) and `ProcessGroupNCCL.cpp` (checks of each collective), whose
exception types and messages these are. `LOOKS` has a function per collective: it takes the call's arguments by name and
its process group, raises what NCCL would, and returns a description, which must be equal on all ranks of the group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.distributed import ReduceOp, get_group_rank

from megatron_fp8.cpu.placement import is_on_host, tensors_in

_DTYPES = frozenset(
    {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)
# Complex numbers are sent as pairs of these.
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_NOT_REDUCED = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_ON_COMPLEX = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
_PREMULTIPLIED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(*values: Any) -> None:
    """Raise for a tensor in `values` (or in lists among them) that NCCL refuses.

    RuntimeError: it is on the host; ValueError: it is sparse or not contiguous; TypeError: its dtype.
    """
    for tensor in tensors_in(values):
        if is_on_host(tensor):
            raise RuntimeError("No backend type associated with device type cpu: NCCL takes GPU tensors only")
        if tensor.layout != torch.strided:
            raise ValueError("Tensors must be CUDA and dense")
        if not tensor.is_contiguous() and not tensor.is_contiguous(memory_format=suggest_memory_format(tensor)):
            raise ValueError(
                f"Tensors must be contiguous; one has shape {list(tensor.shape)}, strides {tensor.stride()}"
            )
        if _REAL.get(tensor.dtype, tensor.dtype) not in _DTYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")


def check_reduction(op: Any, *values: Any) -> None:
    """Raise if NCCL does not reduce `values` with `op`: ValueError for the operation, TypeError for its combination
    with a dtype, RuntimeError otherwise; NotImplementedError if NCCL does and the stand-in does not."""
    kind = reduction(op)
    if kind in _BITWISE:
        raise ValueError(f"Cannot use ReduceOp.{kind.name} with NCCL")
    for tensor in tensors_in(values):
        dtype = tensor.dtype
        if dtype in _REAL and kind not in _ON_COMPLEX:
            raise RuntimeError(f"all_reduce does not support ReduceOp.{kind.name} on complex tensors")
        if dtype in _NOT_REDUCED:
            raise RuntimeError(f"Unsupported Float8 type for NCCL reduction: {dtype}")
        if dtype in _FP8:
            raise NotImplementedError(f"reductions of {dtype} are not emulated: NCCL sums float8 values, gloo does not")
        if dtype == torch.bool and kind == ReduceOp.AVG:
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
        if kind == ReduceOp.PREMUL_SUM and _REAL.get(dtype, dtype) not in _PREMULTIPLIED:
            raise TypeError("PreMulSum Data type must be half, float, bfloat16 or double")


def check_whole_and_part(whole: Tensor, part: Tensor, ranks: int, names: tuple[str, str]) -> None:
    """Raise unless `whole` has as many elements as all ranks' parts (ValueError) and their dtype (TypeError)."""
    if whole.dtype != part.dtype:
        raise TypeError(f"{names[0]} tensor must have the same type as {names[1]} tensor: {whole.dtype}, {part.dtype}")
    if whole.numel() != part.numel() * ranks:
        raise ValueError(
            f"{names[0]} tensor size must be equal to world_size times {names[1]} tensor size: {whole.numel()} elements"
            f" are not {ranks} x {part.numel()}"
        )


def check_alike(tensors: Sequence[Tensor], one: Tensor) -> None:
    """Raise unless all of `tensors` have the dtype (TypeError) and number of elements (ValueError) of `one`."""
    for tensor in tensors:
        if tensor.dtype != one.dtype:
            raise TypeError(f"Tensor list must have the same type: {tensor.dtype}, {one.dtype}")
        if tensor.numel() != one.numel():
            raise ValueError(f"All tensors must have the same size: {tensor.numel()} and {one.numel()} elements")


def reduction(op: Any) -> ReduceOp.RedOpType:
    """The constant that `op`, a `ReduceOp` or one of its constants, is."""
    return next(kind for kind in ReduceOp.RedOpType.__members__.values() if op == kind)


Arguments = Mapping[str, Any]
Look = Callable[[Arguments, Any], str]


def _described(*tensors: Tensor) -> str:
    return " + ".join(f"{str(tensor.dtype).removeprefix('torch.')} x {tensor.numel()}" for tensor in tensors)


def group_rank(arguments: Arguments, group: Any, role: str) -> int | None:
    """The group rank that a call names as `src` or `dst` (`role`), or as `group_src` or `group_dst`, if any."""
    if arguments.get(f"group_{role}") is not None:
        return int(arguments[f"group_{role}"])
    named = arguments.get(role)
    return None if named is None else get_group_rank(group, named)


def _root(arguments: Arguments, group: Any, role: str) -> int:
    # torch defaults to rank 0 of the world in a gather or scatter.
    named = group_rank(arguments, group, role)
    return get_group_rank(group, 0) if named is None else named


def _checked_reduction(arguments: Arguments, reduced: Sequence[Tensor], *others: Tensor) -> str:
    """Check the tensors of a reduction, and return its operation's name."""
    check_tensors(reduced, others)
    check_reduction(arguments["op"], reduced)
    return str(reduction(arguments["op"]).name)


def _all_reduce(arguments: Arguments, group: Any) -> str:  # noqa: ARG001 - looks have the same signature
    tensors = arguments.get("tensors", arguments.get("tensor"))
    tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    return f"all_reduce({_checked_reduction(arguments, tensors)}, {_described(*tensors)})"


def _reduce(arguments: Arguments, group: Any) -> str:
    tensor = arguments["tensor"]
    op = _checked_reduction(arguments, [tensor])
    return f"reduce({op}, {_described(tensor)}, to {_root(arguments, group, 'dst')})"


def _broadcast(arguments: Arguments, group: Any) -> str:
    check_tensors(arguments["tensor"])
    return f"broadcast({_described(arguments['tensor'])}, from {_root(arguments, group, 'src')})"


def _all_gather(arguments: Arguments, group: Any) -> str:  # noqa: ARG001
    parts = arguments["tensor_list"]
    check_tensors(parts, arguments["tensor"])
    return f"all_gather({', '.join(_described(part) for part in parts)})"


def _all_gather_into(arguments: Arguments, group: Any) -> str:
    whole, part = (arguments.get(f"{name}_tensor", arguments.get(name)) for name in ("output", "input"))
    assert isinstance(whole, Tensor)
    assert isinstance(part, Tensor)
    check_tensors(whole, part)
    check_whole_and_part(whole, part, group.size(), ("output", "input"))
    return f"all_gather_into_tensor({_described(part)} a rank)"


def _reduce_scatter(arguments: Arguments, group: Any) -> str:  # noqa: ARG001
    parts = arguments["input_list"]
    op = _checked_reduction(arguments, parts, arguments["output"])
    return f"reduce_scatter({op}, {', '.join(_described(part) for part in parts)})"


def _reduce_scatter_tensor(arguments: Arguments, group: Any) -> str:
    whole, part = arguments["input"], arguments["output"]
    check_tensors(whole, part)
    check_whole_and_part(whole, part, group.size(), ("input", "output"))
    check_reduction(arguments["op"], whole)
    return f"reduce_scatter_tensor({reduction(arguments['op']).name}, {_described(part)} a rank)"


def _all_to_all(arguments: Arguments, group: Any) -> str:  # noqa: ARG001
    received, sent = arguments["output_tensor_list"], arguments["input_tensor_list"]
    check_tensors(received, sent)
    return f"all_to_all({sent[0].dtype})"


def _all_to_all_single(arguments: Arguments, group: Any) -> str:
    received, sent = arguments["output"], arguments["input"]
    check_tensors(received, sent)
    if received.dtype != sent.dtype:
        raise TypeError(f"Tensors must have identical type: {received.dtype}, {sent.dtype}")
    even = not arguments.get("output_split_sizes") and not arguments.get("input_split_sizes")
    if even and (sent.shape[0] % group.size() or received.shape[0] % group.size()):
        raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
    return f"all_to_all_single({_described(sent) if even else sent.dtype})"


def _gather_or_scatter(arguments: Arguments, group: Any, name: str, role: str) -> str:
    tensor, others = arguments["tensor"], arguments[f"{name}_list"]
    check_tensors(tensor, others or [])
    check_alike(others or [], tensor)
    return f"{name}({_described(tensor)}, {role} {_root(arguments, group, role)})"


def _refused(error: type[Exception], message: str) -> Look:
    def look(arguments: Arguments, group: Any) -> NoReturn:  # noqa: ARG001
        raise error(message)

    return look


LOOKS: dict[str, Look] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_coalesced": _refused(RuntimeError, "ProcessGroupNCCL does not support allgather_coalesced"),
    "all_gather_into_tensor": _all_gather_into,
    "all_gather_single": _all_gather_into,
    "_all_gather_base": _all_gather_into,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_single": _reduce_scatter_tensor,
    "_reduce_scatter_base": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "gather": functools.partial(_gather_or_scatter, name="gather", role="dst"),
    "scatter": functools.partial(_gather_or_scatter, name="scatter", role="src"),
    "barrier": lambda arguments, group: "barrier",  # noqa: ARG005
    "monitored_barrier": _refused(ValueError, "monitored_barrier is only implemented for GLOO backend."),
}
# With the role of the rank that they name.
MESSAGES = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}


def look_at_message(tensor: Tensor, peer: int | None) -> str:
    """Check a message and describe it. torch only warns of non-contiguous memory, and then sends it in memory order."""
    if peer is None:
        raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")
    check_tensors(tensor)
    return _described(tensor)
