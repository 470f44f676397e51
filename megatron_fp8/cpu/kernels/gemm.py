"""The GEMM of `transformer_engine_torch`.

Products of BF16, FP16 and float8 values are exact in FP32, in which tensor cores accumulate: operands are widened to
FP32 without their scales, which go into the `alpha` of one SGEMM. On two AMD Zen 3 cores, which have no BF16
arithmetic, torch's BF16 matmul has 0.03 to 0.1 of that speed. CPUs with BF16 arithmetic multiply the FP32 operands in
BF16 (exactly, as the values fit) with FP32 accumulation, through oneDNN. Only `out=` forms are called: autocast would
run others in BF16.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels.casts import torch_dtype
from megatron_fp8.cpu.kernels.gemm_limits import Epilogue, check_gemm, describe
from megatron_fp8.cpu.kernels.quantize import format_of, quantize, quantizes_accumulators

__all__ = ["generic_gemm"]

_NATIVE_BF16 = torch.backends.mkldnn.is_available() and (
    torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
)


@dataclass(frozen=True)
class _Operand:
    """FP32 matrix `[rows, columns]`; `factor` times it is the operand; `fits_bf16`: BF16 represents it exactly."""

    matrix: Tensor
    factor: float
    fits_bf16: bool


@torch.no_grad()
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,  # noqa: ARG001
    workspace_size: int,  # noqa: ARG001
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """`D = alpha * op(B) @ op(A) [+ beta * D] [+ bias]`, `op` transposing where `transA`, `transB` say so.

    A, B: `[..., columns]`, taken as matrices `[rows, columns]`; FP32, BF16, FP16 or quantized. The forward GEMM is
    `TN` with weight A `[n, k]` and input B `[..., k]`, the input gradient `NN`, the weight gradient `NT`.
    D: None or a contiguous tensor to write, such as FP32 `main_grad` with `accumulate` (beta 1 unless given).
    Without D the result has `output_dtype` (A's if None) or is quantized with `quantizer`. FP32 accumulators
    are rounded once; delayed scaling of FP8 operands quantizes the accumulators, other quantizers the rounded values.

    Without `grad`, `bias` `[n]` is added and `gelu` applies GELU (tanh form). With it, any `bias` requests the bias
    gradient, the sum of B over its rows in D's dtype, and `gelu` multiplies by GELU's derivative at `gelu_in`.

    Returns [D, bias gradient or None, values before GELU or None, extra_output]. Raises NotImplementedError for
    overlapped communication and unknown formats, RuntimeError for what TE or cuBLASLt refuse (`gemm_limits`).
    """
    if comm_overlap is not None or comm_type is not None or bulk_overlap:
        raise NotImplementedError("generic_gemm with overlapped communication (Userbuffers) has no CPU stand-in")
    a, b, quantized = describe("A", A), describe("B", B), _is_quantized(A) or _is_quantized(B)
    dtype = _output_dtype(A, D, output_dtype)
    sizes, shape = _sizes(A, transA, B, transB)
    _check_output(D, dtype, shape)
    _check_beta(D, accumulate, beta)
    if 0 not in sizes:
        in_kernel = quantized and quantizes_accumulators(quantizer)
        output = torch_dtype(quantizer.dtype) if in_kernel else dtype
        biased = None if bias is None else bias.dtype if not grad else dtype
        epilogue = Epilogue(output, biased, gelu, grad, accumulate, use_split_accumulator)
        check_gemm(a, transA, b, transB, sizes, epilogue, D)
    right, left = _operand(A, not transA), _operand(B, transB)
    bias_grad = left.matrix.sum(dim=0).mul_(left.factor).to(dtype) if grad and bias is not None else None
    in_place = quantizer is None and not gelu and D is not None and D.dtype == torch.float32
    total = D if in_place else torch.empty(shape, dtype=torch.float32)
    if accumulate and not in_place:
        total.copy_(D)
    beta = (1.0 if beta is None else beta) if accumulate else 0.0
    _multiply(left, transB, right, transA, alpha, beta, None if grad else bias, total)
    if in_place:
        return [D, bias_grad, None, extra_output]
    before_gelu = None
    if gelu and not grad:
        before_gelu = total.to(torch_dtype(bias_type) if quantized else dtype)
        total = torch.nn.functional.gelu(total, approximate="tanh")
    elif gelu:
        total = _gelu_backward(total, gelu_in)
    return [_deliver(total, dtype, D, quantizer, quantized), bias_grad, before_gelu, extra_output]


def _multiply(
    left: _Operand,
    transpose_left: bool,
    right: _Operand,
    transpose_right: bool,
    alpha: float,
    beta: float,
    bias: Tensor | None,
    total: Tensor,
) -> None:
    """`total = alpha * op(left) @ op(right) + beta * total + bias`, in FP32 `[..., n]`."""
    rows = left.matrix.t() if transpose_left else left.matrix
    columns = right.matrix.t() if transpose_right else right.matrix
    flat = total.view(rows.shape[0], columns.shape[1])
    addend = flat
    if bias is not None and beta == 0.0:
        addend, beta, bias = bias.to(torch.float32), 1.0, None
    factor, in_bf16 = alpha * left.factor * right.factor, left.fits_bf16 and right.fits_bf16
    if abs(factor) > torch.finfo(torch.float32).max:
        # Both operands are huge. Scaled separately, the product is infinite where it should be, and 0 where it is 0.
        rows, columns, factor, in_bf16 = rows * left.factor, columns * right.factor, alpha, False
    with _bf16_products(_NATIVE_BF16 and in_bf16):
        torch.addmm(addend, rows, columns, beta=beta, alpha=factor, out=flat)
    if bias is not None:
        flat.add_(bias)


@contextlib.contextmanager
def _bf16_products(enabled: bool) -> Iterator[None]:
    """Let oneDNN multiply FP32 operands in BF16 inside."""
    if not enabled:
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _gelu_backward(grad: Tensor, gelu_in: Tensor | None) -> Tensor:
    if gelu_in is None:
        raise RuntimeError("generic_gemm with grad and gelu needs gelu_in, the values before GELU")
    before = gelu_in.view(grad.shape).to(torch.float32)
    return torch.ops.aten.gelu_backward(grad, before, approximate="tanh")


def _is_quantized(operand: Any) -> bool:
    return not isinstance(operand, Tensor) or hasattr(operand, "_quantizer")


def _operand(operand: Any, columnwise: bool) -> _Operand:
    """Widen an operand; `columnwise` names the usage that TE's GEMM reads for this side and transposition."""
    if _is_quantized(operand):
        format_ = format_of(operand)
        values, factor = format_.values(operand, columnwise)
        return _Operand(values.reshape(-1, values.shape[-1]), factor, format_.values_fit_bf16)
    matrix = operand.reshape(-1, operand.shape[-1]).to(torch.float32)
    return _Operand(matrix, 1.0, operand.dtype == torch.bfloat16)


def _output_dtype(A: Any, D: Any, output_dtype: Any) -> torch.dtype:
    if output_dtype is not None:
        return torch_dtype(output_dtype)
    given = A if D is None else D
    return given.dtype if isinstance(given, Tensor) else given._dtype


def _sizes(A: Any, transa: bool, B: Any, transb: bool) -> tuple[tuple[int, int, int], list[int]]:
    """m, n and k of `gemm_limits`, and the result's shape: `[*leading axes of B, m]`, or `[n, m]` for the weight
    gradient, which sums over B's rows. Raises RuntimeError if A and B do not match."""
    a, b = A.size(), B.size()
    rows_a, rows_b = math.prod(a[:-1]), math.prod(b[:-1])
    k, k_of_b = (a[-1] if transa else rows_a), (rows_b if transb else b[-1])
    if k != k_of_b:
        raise RuntimeError(
            f"Invalid matrix dimensions for GEMM: it sums over {k} elements of A {tuple(a)} (transA={transa}) but over"
            f" {k_of_b} of B {tuple(b)} (transB={transb})"
        )
    m, n = (rows_a if transa else a[-1]), (b[-1] if transb else rows_b)
    return (m, n, k), [n, m] if transb else [*b[:-1], m]


def _check_output(D: Any, dtype: torch.dtype, shape: list[int]) -> None:
    if D is None:
        return
    if list(D.size()) != shape or D.dtype != dtype:
        raise RuntimeError(
            f"GEMM output has invalid dims or dtype: D is {D.dtype} {list(D.size())}; the result is {dtype} {shape}"
        )
    if not _is_quantized(D) and not D.is_contiguous():
        raise RuntimeError("GEMM output D is not contiguous; TE's GEMM writes its memory in order")


def _check_beta(D: Any, accumulate: bool, beta: float | None) -> None:
    if accumulate and D is None:
        raise RuntimeError("GEMM accumulates into an output that was not given")
    if beta and not accumulate:
        raise RuntimeError("Trying to use non-zero beta while not accumulating into D tensor")


def _deliver(total: Tensor, dtype: torch.dtype, D: Any, quantizer: Any, fp8_operands: bool) -> Any:
    if quantizer is None:
        return total.to(dtype) if D is None else D.copy_(total)
    fused = fp8_operands and quantizes_accumulators(quantizer)
    if D is None:
        D = format_of(quantizer).empty(quantizer, total.shape, dtype, "cuda")
    return quantize(total if fused else total.to(dtype), quantizer, D)
