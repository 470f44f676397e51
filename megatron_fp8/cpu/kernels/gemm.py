"""Owns the GEMM of `transformer_engine_torch`. Must not know modules or recipes.

Products of BF16, FP16 and float8 values are exact in FP32, and FP32 is what the tensor cores accumulate in: every
operand is widened to FP32 without its scale, one SGEMM multiplies, and the scales go into its `alpha`. CPUs without
native BF16 arithmetic are 10 to 200 times slower in torch's BF16 matmul than so.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels import casts
from megatron_fp8.cpu.kernels.quantize import quantize, rowwise_bytes, torch_dtype

__all__ = ["generic_gemm"]


def generic_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,  # noqa: ARG001
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,  # noqa: ARG001
    workspace_size: int,  # noqa: ARG001
    accumulate: bool,
    use_split_accumulator: bool,  # noqa: ARG001
    comm_overlap: Any = None,
    comm_type: Any = None,  # noqa: ARG001
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, Tensor | None, Tensor | None, Any]:
    """`D = alpha * op(B) @ op(A) [+ beta * D] [+ bias]`, `op` being the transpose where `transa`/`transb` says so.

    A and B are `[..., columns]`, taken as matrices of their last axis: `TN` with weight A `[n, k]` and input B
    `[m, k]` is the forward GEMM, `NN` the input gradient, `NT` the weight gradient. Operands: FP32, BF16, FP16
    tensors or per-tensor scaled FP8. D: written if given (FP32 `main_grad` with `accumulate`), else made in
    `output_dtype`, or quantised with `quantizer`. The accumulator is FP32 and is rounded once.

    Forward: `bias` `[n]` is added, and with `gelu` the result passes through GELU (tanh form), what stood before
    going into `gelu_in`. With `grad`: `bias` asks for the bias gradient, the sum of B over its rows, in bias's
    dtype; `gelu` multiplies the result with GELU's derivative at `gelu_in`.

    Returns `(D, bias gradient, gelu_in, extra_output)`. Raises NotImplementedError for overlapped communication.
    """
    if comm_overlap is not None or bulk_overlap:
        raise NotImplementedError("generic_gemm with overlapped communication (Userbuffers) has no CPU stand-in")
    left, left_scale = _matrix(B)
    right, right_scale = _matrix(A)
    if right is left and A is not B:
        raise AssertionError("operands share a buffer")
    bias_grad = left.sum(dim=0).mul_(left_scale).to(bias.dtype) if grad and bias is not None else None
    left = left.t() if transb else left
    right = right.t() if transa else right
    total_scale = float(alpha) * left_scale * right_scale

    accumulates = accumulate and D is not None
    if accumulates and D.dtype == torch.float32 and not gelu:  # type: ignore[union-attr]
        flat = D.view(left.shape[0], right.shape[1])  # type: ignore[union-attr]
        torch.addmm(flat, left, right, beta=1.0 if beta is None else beta, alpha=total_scale, out=flat)
        return D, bias_grad, None, extra_output

    result = torch.mm(left, right)
    if total_scale != 1.0:
        result.mul_(total_scale)
    if bias is not None and not grad:
        result.add_(bias)
    dtype = D.dtype if D is not None and quantizer is None else _result_dtype(A, output_dtype)
    result, gelu_in = _apply_gelu(result, gelu, gelu_in, grad, dtype)
    result = result.view(_result_shape(B, transb, result))
    if accumulates:
        result.add_(D.view(result.shape), alpha=1.0 if beta is None else beta)  # type: ignore[union-attr]
    return _deliver(result, dtype, D, quantizer), bias_grad, gelu_in, extra_output


def _matrix(operand: Any) -> tuple[Tensor, float]:
    """FP32 matrix `[rows, columns]` and the factor that turns it into the operand's values."""
    if isinstance(operand, Tensor) and not hasattr(operand, "_fp8_dtype"):
        return operand.reshape(-1, operand.shape[-1]).to(torch.float32), 1.0
    if not hasattr(operand, "_fp8_dtype") or not hasattr(operand, "_transpose"):
        raise NotImplementedError(f"generic_gemm of {type(operand).__name__} has no CPU stand-in")
    data = rowwise_bytes(operand)
    values, factor = casts.unscaled(data.reshape(-1, data.shape[-1]), torch_dtype(operand._fp8_dtype))
    return values, factor * float(operand._scale_inv)


def _result_dtype(A: Any, output_dtype: Any) -> torch.dtype:
    if output_dtype is not None:
        return torch_dtype(output_dtype)
    return A.dtype if isinstance(A, Tensor) else A._dtype


def _result_shape(B: Any, transb: bool, result: Tensor) -> list[int]:
    """The forward and the input-gradient GEMM keep B's leading axes, the weight gradient has two axes."""
    if transb:
        return list(result.shape)
    shape = B.shape if isinstance(B, Tensor) else B.size()
    return [*shape[:-1], result.shape[-1]]


def _apply_gelu(
    result: Tensor, gelu: bool, gelu_in: Tensor | None, grad: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    if not gelu:
        return result, gelu_in
    if grad:
        if gelu_in is None:
            raise ValueError("generic_gemm with gelu and grad needs gelu_in")
        before = gelu_in.view(result.shape).float()
        return torch.ops.aten.gelu_backward(result, before, approximate="tanh"), gelu_in
    before = result.to(dtype)
    gelu_in = before if gelu_in is None else gelu_in.copy_(before.view(gelu_in.shape))
    return torch.nn.functional.gelu(before.float(), approximate="tanh"), gelu_in


def _deliver(result: Tensor, dtype: torch.dtype, D: Any, quantizer: Any) -> Any:
    if quantizer is not None:
        return quantize(result.to(dtype), quantizer, D)
    if D is None:
        return result.to(dtype)
    return D.copy_(result.view(D.shape))
