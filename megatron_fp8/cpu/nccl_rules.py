"""What NCCL, as torch calls it, refuses: operations, element types, memory, sizes and host tensors.

Sources: torch 2.13's `NCCLUtils.hpp` (the table of types) and `ProcessGroupNCCL.cpp` (checks of each collective), whose
kinds of errors and words these are. Must not know gloo, nor the order in which ranks call (`collective_order`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.distributed import ReduceOp

from megatron_fp8.cpu.placement import is_on_host, tensors_in

_DTYPES = frozenset(
    {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)
# Complex numbers travel as pairs of these.
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_NOT_REDUCED = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_ON_COMPLEX = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
_PREMULTIPLIED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(*values: Any) -> None:
    """Raise for a tensor in `values` (lists of them too) that NCCL cannot read.

    RuntimeError: a host tensor; ValueError: a sparse one, or one whose memory is not in order; TypeError: its dtype.
    """
    for tensor in tensors_in(values):
        if is_on_host(tensor):
            raise RuntimeError("No backend type associated with device type cpu: NCCL takes a GPU's tensors only")
        if tensor.layout != torch.strided:
            raise ValueError("Tensors must be CUDA and dense")
        if not tensor.is_contiguous() and not tensor.is_contiguous(memory_format=suggest_memory_format(tensor)):
            raise ValueError(
                f"Tensors must be contiguous; one has shape {list(tensor.shape)}, strides {tensor.stride()}"
            )
        if _REAL.get(tensor.dtype, tensor.dtype) not in _DTYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")


def check_reduction(op: Any, *values: Any) -> None:
    """Raise where NCCL does not reduce `values` with `op`: ValueError for the operation, TypeError for one that the
    dtype does not have, RuntimeError for the rest; NotImplementedError where NCCL does and this stand-in does not."""
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
            raise NotImplementedError(
                f"reductions of {dtype} are not emulated: NCCL adds float8 numbers, gloo has no such sum"
            )
        if dtype == torch.bool and kind == ReduceOp.AVG:
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
        if kind == ReduceOp.PREMUL_SUM and _REAL.get(dtype, dtype) not in _PREMULTIPLIED:
            raise TypeError("PreMulSum Data type must be half, float, bfloat16 or double")


def check_whole_and_part(whole: Tensor, part: Tensor, ranks: int, names: tuple[str, str]) -> None:
    """Raise unless `whole` is as long as the parts of all ranks (ValueError) and of their dtype (TypeError)."""
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
    """Which operation `op`, a `ReduceOp` or one of its constants, is."""
    return next(kind for kind in ReduceOp.RedOpType.__members__.values() if op == kind)
