"""What `generic_gemm` refuses: the checks of Transformer Engine and of cuBLASLt.

Sources: TE's `cublaslt_gemm.cu` (`CanonicalizeGemmInput`, `cublas_gemm`) and `gemm.cpp`, TE's
`test_float8_blockwise_gemm_exact.py`, and the tables of `cublasLtMatmul` in cuBLAS's documentation. In BLAS's order of
axes the product is `m x n`, summed over k: m the columns of the result, n its rows. Hopper's FP8 GEMMs read both
operands along k ("TN"), so the columnwise data of operands given the other way; later GPUs read any layout of
per-tensor scaled FP8.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels.casts import torch_dtype

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
# Dtypes of the result by the operands' common dtype, and of the bias by the result of FP8 operands.
_OUTPUTS = {_FP32: (_FP32,), _BF16: (_BF16, _FP32), _FP16: (_FP16, _FP32)}
_FP8_BIAS = {_BF16: (_BF16,), _FP16: (_FP16,), _FP32: (_BF16,), _FP8[0]: (_BF16, _FP16), _FP8[1]: (_BF16, _FP16)}
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Operand:
    """One side of a GEMM. `scaling`: "" for a plain tensor, "tensor", "1D blocks", "2D blocks" or "MXFP8"."""

    name: str
    scaling: str
    dtype: torch.dtype
    rowwise: Tensor | None
    columnwise: Tensor | None

    @property
    def is_fp8(self) -> bool:
        return bool(self.scaling)

    @property
    def in_blocks(self) -> bool:
        return self.scaling.endswith("blocks")


@dataclass(frozen=True)
class Epilogue:
    """What is done to the result: `bias` is added or, with `grad`, its gradient computed; likewise GELU."""

    output: torch.dtype
    bias: torch.dtype | None
    gelu: bool
    grad: bool
    accumulate: bool
    split_accumulator: bool


def describe(name: str, operand: Any) -> Operand:
    """The operand `name`, "A" or "B". Raises RuntimeError for a plain tensor of an unsupported dtype, or that is not
    contiguous, which TE would read as if it were."""
    if isinstance(operand, Tensor) and not hasattr(operand, "_quantizer"):
        if operand.dtype not in _OUTPUTS:
            raise RuntimeError(f"GEMM operand {name} is {operand.dtype}; TE's GEMM takes FP32, BF16, FP16 and FP8")
        if not operand.is_contiguous():
            raise RuntimeError(f"GEMM operand {name} is not contiguous; TE's GEMM reads its memory in order")
        return Operand(name, "", operand.dtype, operand, None)
    dtype = torch_dtype(operand._fp8_dtype)
    if hasattr(operand, "_transpose_invalid"):
        transpose = None if operand._transpose_invalid else operand._transpose
        return Operand(name, "tensor", dtype, operand._data, transpose)
    scaling = "MXFP8"
    if hasattr(operand, "_is_2D_scaled"):
        scaling = "2D blocks" if operand._is_2D_scaled else "1D blocks"
    return Operand(name, scaling, dtype, operand._rowwise_data, operand._columnwise_data)


def check_gemm(
    a: Operand, transa: bool, b: Operand, transb: bool, sizes: tuple[int, int, int], epilogue: Epilogue, out: Any
) -> None:
    """Raise RuntimeError for a GEMM that TE or cuBLASLt refuses on the emulated GPU. sizes: m, n, k, none of them 0."""
    _check_scaling(a, b)
    any_layout = a.scaling == "tensor" and torch.cuda.get_device_capability() >= (10, 0)
    for operand, along_k in ((a, transa), (b, not transb)):
        _check_usage(operand, along_k, any_layout)
    _check_dtypes(a, b, epilogue)
    if a.is_fp8:
        _check_fp8_sizes(a, transa, b, transb, sizes, epilogue, any_layout)
        _check_addresses(a, transa, b, not transb, out)
    if a.in_blocks:
        _check_blocks(a, b, sizes, epilogue)


def _check_scaling(a: Operand, b: Operand) -> None:
    if a.scaling == b.scaling or (a.in_blocks and b.in_blocks):
        return
    kinds = [f"{x.name} {'plain ' + str(x.dtype) if not x.is_fp8 else 'FP8 scaled by ' + x.scaling}" for x in (a, b)]
    raise RuntimeError(
        f"GEMM operands need compatible scaling modes, but {' and '.join(kinds)} were given: there is no cuBLASLt"
        " algorithm for them"
    )


def _check_usage(operand: Operand, along_k: bool, any_layout: bool) -> None:
    """`along_k`: whether rowwise data is contiguous along the summed axis."""
    if not operand.is_fp8:
        return
    if operand.rowwise is None and operand.columnwise is None:
        raise RuntimeError(f"Input {operand.name} does not hold any data")
    if any_layout or (operand.rowwise if along_k else operand.columnwise) is not None:
        return
    usage = "row-wise" if along_k else "column-wise"
    raise RuntimeError(
        f"Input {operand.name} is missing {usage} usage ({operand.scaling}): FP8 GEMMs of this GPU read both operands"
        " along the summed axis"
    )


def _check_dtypes(a: Operand, b: Operand, epilogue: Epilogue) -> None:
    output, bias = epilogue.output, epilogue.bias
    if not a.is_fp8:
        if a.dtype != b.dtype or output not in _OUTPUTS[a.dtype]:
            raise RuntimeError(f"Unable to find any suitable algorithms: {a.dtype} x {b.dtype} to {output}")
        if bias is not None and bias != output:
            raise RuntimeError(f"the bias is {bias}; cuBLASLt reads it in the dtype of the result, {output}")
        return
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise RuntimeError("Unable to find any suitable algorithms: there is no FP8 GEMM of E5M2 x E5M2")
    if output == torch.float8_e5m2 and a.dtype == b.dtype:
        raise RuntimeError("Unable to find any suitable algorithms: E4M3 x E4M3 has no E5M2 result")
    if output in _FP8 and epilogue.accumulate:
        raise RuntimeError("Accumulation mode not supported with FP8 GEMM output")
    if bias is not None and not epilogue.grad and bias not in _FP8_BIAS[output]:
        raise RuntimeError(f"Unable to find any suitable algorithms: FP8 GEMM to {output} with a bias of {bias}")
    if bias is not None and epilogue.grad:
        raise RuntimeError(
            "Epilogue requested outside of the available cuBLAS functionality: FP8 GEMMs have no bias gradient"
            + (" (float8 block scaled GEMM)" if a.in_blocks else "")
        )


def _check_fp8_sizes(
    a: Operand,
    transa: bool,
    b: Operand,
    transb: bool,
    sizes: tuple[int, int, int],
    epilogue: Epilogue,
    any_layout: bool,
) -> None:
    m, n, k = sizes
    leading_a = m if any_layout and not transa else k
    leading_b = n if any_layout and transb else k
    for operand, leading in ((a, leading_a), (b, leading_b)):
        if leading % _ALIGNMENT_BYTES:
            raise RuntimeError(
                f"Leading dimension requirement on {operand.name} for FP8 GEMM: {leading} is not a multiple of"
                f" {_ALIGNMENT_BYTES}. Caller must pad."
            )
    if m * epilogue.output.itemsize % _ALIGNMENT_BYTES:
        raise RuntimeError(
            f"Unable to find any suitable algorithms: the FP8 GEMM's result has {m} columns of {epilogue.output},"
            f" whose bytes are not a multiple of {_ALIGNMENT_BYTES} (outer dimension requirement on A)"
        )


def _check_addresses(a: Operand, a_along_k: bool, b: Operand, b_along_k: bool, out: Any) -> None:
    # Columnwise data may be a view here, a copy with another address on a GPU.
    read = [(x.name, x.rowwise) for x, along_k in ((a, a_along_k), (b, b_along_k)) if along_k]
    for name, data in [*read, ("D", out if isinstance(out, Tensor) and not hasattr(out, "_quantizer") else None)]:
        if data is not None and data.data_ptr() % _ALIGNMENT_BYTES:
            raise RuntimeError(
                f"Unable to find any suitable algorithms: {name} of an FP8 GEMM starts"
                f" {data.data_ptr() % _ALIGNMENT_BYTES} bytes past a multiple of {_ALIGNMENT_BYTES}"
            )


def _check_blocks(a: Operand, b: Operand, sizes: tuple[int, int, int], epilogue: Epilogue) -> None:
    m, n, _ = sizes
    if a.scaling == b.scaling == "2D blocks":
        raise RuntimeError("Only 1D by 1D, 1D by 2D, and 2D by 1D block scaling supported, but got 2D by 2D")
    if m % 8:
        raise RuntimeError(f"Outer dimension requirement on A for block scaling GEMM: {m} % 8. Caller must pad.")
    if n % 8 and b.scaling == "1D blocks":
        raise RuntimeError(f"Outer dimension requirement on B for block scaling GEMM: {n} % 8. Caller must pad.")
    if epilogue.gelu and not epilogue.grad:
        raise RuntimeError(
            "Epilogue requested outside of the available cuBLAS functionality for float8 block scaled GEMM: GELU"
        )
    if epilogue.gelu and epilogue.output != _BF16:
        raise RuntimeError(
            f"an unsupported value or parameter was passed: float8 block scaled GEMM with GELU's gradient to"
            f" {epilogue.output}"
        )
    if not epilogue.split_accumulator:
        raise RuntimeError("Unable to find suitable cuBLAS GEMM algorithm: block scaling needs the split accumulator")
