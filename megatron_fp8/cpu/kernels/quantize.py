"""Quantization functions of `transformer_engine_torch`, by format, and how kernels return quantized results."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels import blockwise, float8, mxfp8
from megatron_fp8.cpu.kernels.casts import torch_dtype

__all__ = (
    "bgrad_quantize create_empty_quantized_tensor dequantize fp8_transpose multi_tensor_quantize quantize "
    "split_quantize swap_first_dims"
).split()


@dataclass(frozen=True)
class Format:
    """The functions of one quantized format.

    quantize(tensor, quantizer, output or None, noop) -> output; empty(quantizer, shape, dtype, device) -> tensor;
    values(storage, columnwise) -> FP32 values in logical order, to be multiplied with the factor returned beside them;
    dequantize(storage, dtype) -> tensor; values_fit_bf16: whether BF16 represents every such value exactly.
    """

    quantize: Callable[[Tensor, Any, Any, bool], Any]
    empty: Callable[[Any, Sequence[int], torch.dtype, Any], Any]
    values: Callable[[Any, bool], tuple[Tensor, float]]
    dequantize: Callable[[Any, torch.dtype], Tensor]
    values_fit_bf16: bool


_FLOAT8 = Format(float8.quantize_float8, float8.empty_float8, float8.float8_values, float8.dequantize_float8, True)


def _block_format(quantize: Any, empty: Any, values: Callable[[Any, bool], tuple[Tensor, float]], fits: bool) -> Format:
    def dequantize(storage: Any, dtype: torch.dtype) -> Tensor:
        # The factor is 1.
        return values(storage, storage._rowwise_data is None)[0].to(dtype).contiguous()

    return Format(quantize, empty, values, dequantize, fits)


# Blockwise scales need not be powers of two.
_BLOCKWISE = _block_format(blockwise.quantize_blockwise, blockwise.empty_blocks, blockwise.blockwise_values, False)
_MXFP8 = _block_format(mxfp8.quantize_mxfp8, mxfp8.empty_mxfp8, mxfp8.mxfp8_values, True)


@functools.cache
def _formats() -> dict[type, Format]:
    # TE imports the extension before it has these classes.
    from transformer_engine.pytorch import tensor as te

    return {
        te.Float8Quantizer: _FLOAT8,
        te.Float8CurrentScalingQuantizer: _FLOAT8,
        te.Float8TensorStorage: _FLOAT8,
        te.Float8BlockQuantizer: _BLOCKWISE,
        te.Float8BlockwiseQTensorStorage: _BLOCKWISE,
        te.MXFP8Quantizer: _MXFP8,
        te.MXFP8TensorStorage: _MXFP8,
    }


def format_of(thing: Any) -> Format:
    """The format of a TE quantizer or quantized tensor. Raises NotImplementedError for one without a stand-in."""
    formats = _formats()
    for base in type(thing).__mro__:
        if base in formats:
            return formats[base]
    raise NotImplementedError(
        f"{type(thing).__name__} has no CPU stand-in; those of delayed, current, block and MXFP8 scaling have one"
    )


@torch.no_grad()
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Quantize `tensor` (FP32, BF16 or FP16, any shape) with a TE quantizer.

    Writes to `output`, a quantized tensor or storage, or returns a new one with the quantizer's usages (a storage if it
    is `internal`). A `noop` flag of 1 leaves `output` unchanged. Raises NotImplementedError for other quantizers.
    """
    skip = noop is not None and noop.numel() > 0 and float(noop) == 1.0
    return format_of(quantizer).quantize(tensor, quantizer, output, skip)


def dequantize(input: Any, otype: Any) -> Tensor:
    """Values of a quantized tensor, rowwise if it has them, rounded once to `otype` (a TE `DType`)."""
    return format_of(input).dequantize(input, torch_dtype(otype))


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """A quantized tensor of nominal `dtype` with undefined values and the usages of `quantizer`."""
    del pin_memory
    return format_of(quantizer).empty(quantizer, shape, dtype, device)


@torch.no_grad()
def bgrad_quantize(input: Tensor, quantizer: Any) -> list[Any]:
    """Bias gradient, the FP32 sum of `input` `[..., n]` over its rows in input's dtype, and `input` quantized.

    Without a quantizer the second is `input` itself.
    """
    rows = input.reshape(-1, input.shape[-1])
    # torch accumulates sums of BF16 in FP32; `dtype=torch.float32` gives the same values at a quarter of the speed.
    bias_grad = rows.sum(dim=0)
    return [bias_grad, input if quantizer is None else quantize(input, quantizer)]


def multi_tensor_quantize(tensor_list: Sequence[Tensor], quantizer_list: Sequence[Any]) -> list[Any]:
    """Each tensor quantized with its quantizer."""
    return [quantize(tensor, quantizer) for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True)]


def split_quantize(
    tensor: Tensor, split_sections: Sequence[int], quantizer_list: Sequence[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """`tensor` split along its first axis into sections of the given sizes, each quantized with its quantizer."""
    # One allocation for all outputs saves kernel launches on a GPU.
    del disable_bulk_allocation
    return multi_tensor_quantize(tensor.split(list(split_sections)), quantizer_list)


def fp8_transpose(input: Tensor, dtype: Any, *, out: Tensor | None) -> Tensor:
    """Columnwise bytes `[last, *rest]` of rowwise bytes `[*rest, last]`, as a view.

    `out` is the caller's former transpose, and is not written: it may be a view of other bytes.
    """
    del dtype, out
    return float8.columnwise_view(input)


def swap_first_dims(tensor: Tensor, *, out: Tensor | None) -> Tensor:
    """`[a, b, *rest]` as contiguous `[b, a, *rest]`, written to `out` if given."""
    swapped = tensor.transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)


def quantizes_accumulators(quantizer: Any) -> bool:
    """Whether TE's CUDA kernel quantizes its FP32 accumulators directly, as with delayed scaling."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    return isinstance(quantizer, Float8Quantizer)


def accumulator_dtype(quantizer: Any, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a kernel's result for `deliver`: FP32 if the quantizer reads FP32."""
    return torch.float32 if quantizer is not None and quantizes_accumulators(quantizer) else dtype


def deliver(result: torch.Tensor, dtype: torch.dtype, quantizer: Any = None, out: Any = None) -> Any:
    """Round `result` (FP32 or `dtype`, may be overwritten) once and return it as a kernel's output, in `out` if given.

    dtype: high-precision output dtype, and the nominal dtype of a quantized output. quantizer: delayed scaling
    quantizes FP32 values and records their amax, as TE's fused kernels do; others quantize values rounded to `dtype`.
    """
    if quantizer is None:
        if out is None:
            return result.to(dtype)
        return out.copy_(result)
    if not quantizes_accumulators(quantizer):
        return quantize(result.to(dtype), quantizer, out)
    if out is None:
        out = quantizer.make_empty(result.shape, dtype=dtype, device=result.device)
    return quantize(result, quantizer, out)
