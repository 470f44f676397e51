"""Owns quantisation and dequantisation of `transformer_engine_torch` for per-tensor scaling, delayed and current.

A quantised tensor's columnwise data (`_transpose`) is a strided view of its rowwise bytes: the GEMM here reads any
layout, so a copy would only cost time and memory, and a view cannot go stale. Transformer Engine communicates
rowwise bytes only with these quantisers. Must not know GEMMs or modules.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.enums import DType
from megatron_fp8.cpu.kernels import casts

__all__ = [
    "bgrad_quantize",
    "compute_amax",
    "create_empty_quantized_tensor",
    "dequantize",
    "fp8_transpose",
    "quantize",
]

_FP32_MAX = torch.finfo(torch.float32).max
_TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def torch_dtype(te_dtype: Any) -> torch.dtype:
    """The torch dtype of one of TE's (`DType` of the extension or of TE's Python, or an integer)."""
    return _TORCH_DTYPES[DType(int(te_dtype))]


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Quantise `tensor` (FP32, BF16 or FP16, any shape) with a per-tensor quantiser of Transformer Engine.

    Delayed scaling (`Float8Quantizer`): multiplies with the scale as it stands, and takes the larger of the
    tensor's amax and `quantizer.amax` into `quantizer.amax`. Current scaling (`Float8CurrentScalingQuantizer`): the
    scale comes from the tensor's own amax, reduced over the quantiser's group if it has one.

    Writes `output` (a Float8Tensor or its storage) or returns a new one; leaves `output` alone where `noop` is 1.
    Raises NotImplementedError for other quantisers.
    """
    if output is not None and noop is not None and float(noop) == 1.0:
        return output
    fp8 = torch_dtype(quantizer.dtype)
    scale = _scale(tensor, quantizer, fp8)
    if output is None:
        return _new(tensor, quantizer, casts.to_fp8(tensor.detach(), scale, fp8), scale)
    _write(output, tensor, quantizer, scale, fp8)
    return output


def _scale(tensor: Tensor, quantizer: Any, fp8: torch.dtype) -> Tensor:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    if isinstance(quantizer, Float8Quantizer):
        quantizer.amax.copy_(torch.maximum(quantizer.amax.reshape(()), casts.amax(tensor.detach())))
        return quantizer.scale
    if isinstance(quantizer, Float8CurrentScalingQuantizer):
        amax = casts.amax(tensor.detach())
        if quantizer.with_amax_reduction:
            group = quantizer._canonicalized_amax_reduction_group()
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
        return current_scale(amax, casts.largest(fp8), quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    raise NotImplementedError(f"quantize with {type(quantizer).__name__} has no CPU stand-in")


def current_scale(amax: Tensor, fp8_max: float, force_pow_2: bool, epsilon: float) -> Tensor:
    """Scale FP32 `[1]` for a tensor whose largest magnitude is `amax` (TE, `common/recipe/recipe_common.cuh`).

    Degenerate: amax below `epsilon` counts as epsilon; 0, infinite or NaN gives 1; so small that the scale
    overflows gives the FP32 maximum. `force_pow_2` rounds down to a power of two.
    """
    amax = amax.reshape(1).clamp(min=epsilon)
    scale = fp8_max / amax
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, _FP32_MAX), scale)
    scale = torch.where(torch.isfinite(amax) & (amax > 0), scale, torch.ones_like(scale))
    if force_pow_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def create_empty_quantized_tensor(
    quantizer: Any,
    shape: list[int],
    dtype: torch.dtype,
    device: torch.device,
    pin_memory: bool = False,  # noqa: ARG001
) -> Any:
    """A quantised tensor of nominal `dtype` with undefined bytes and scale, with the usages of `quantizer`."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    if not isinstance(quantizer, Float8Quantizer | Float8CurrentScalingQuantizer):
        raise NotImplementedError(f"an empty tensor of {type(quantizer).__name__} has no CPU stand-in")
    data = torch.empty(shape, dtype=torch.uint8, device=device)
    return _wrap(data, torch.empty(1, device=device), quantizer, dtype)


def _new(tensor: Tensor, quantizer: Any, data: Tensor, scale: Tensor) -> Any:
    return _wrap(data, torch.reciprocal(scale).reshape(1), quantizer, tensor.dtype)


def _wrap(data: Tensor, scale_inv: Tensor, quantizer: Any, dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    parts = {
        "data": data if quantizer.rowwise_usage else None,
        "data_transpose": fp8_transpose(data, quantizer.dtype) if quantizer.columnwise_usage else None,
        "fp8_scale_inv": scale_inv,
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(fake_dtype=dtype, **parts)
    return Float8Tensor(shape=data.shape, dtype=dtype, device=data.device, **parts)


def _write(output: Any, tensor: Tensor, quantizer: Any, scale: Tensor, fp8: torch.dtype) -> None:
    if output._data is not None:
        casts.to_fp8(tensor.detach(), scale, fp8, out=output._data.view(tensor.shape))
        data = output._data
    else:
        data = casts.to_fp8(tensor.detach(), scale, fp8)
    if quantizer.columnwise_usage or output._transpose is not None:
        output._transpose = fp8_transpose(data, quantizer.dtype)
        output._transpose_invalid = False
    output._scale_inv.copy_(torch.reciprocal(scale).reshape(output._scale_inv.shape))
    output._fp8_dtype = type(output._fp8_dtype)(int(quantizer.dtype))


def fp8_transpose(data: Tensor, dtype: Any, out: Tensor | None = None) -> Tensor:  # noqa: ARG001
    """Columnwise bytes `[last, *rest]` of rowwise bytes `[*rest, last]`: a view, so `out` is not written."""
    return data.movedim(-1, 0) if data.dim() > 1 else data


def rowwise_bytes(tensor: Any) -> Tensor:
    """Bytes of a quantised tensor in their logical order, whichever of the two usages it keeps."""
    if tensor._data is not None:
        return tensor._data
    if tensor._transpose is None or tensor._transpose_invalid:
        raise RuntimeError("quantised tensor has neither rowwise nor valid columnwise data")
    return tensor._transpose.movedim(0, -1)


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    """Values of a per-tensor scaled FP8 tensor in a high-precision dtype: `fp8 * scale_inv` in FP32, rounded once."""
    if not hasattr(tensor, "_fp8_dtype") or not hasattr(tensor, "_transpose"):
        raise NotImplementedError(f"dequantize of {type(tensor).__name__} has no CPU stand-in")
    values, factor = casts.unscaled(rowwise_bytes(tensor).contiguous(), torch_dtype(tensor._fp8_dtype))
    if factor != 1.0:
        values.mul_(factor)
    return values.mul_(tensor._scale_inv.reshape(())).to(torch_dtype(dtype))


def bgrad_quantize(grad_output: Tensor, quantizer: Any) -> list[Any]:
    """Bias gradient, the sum of `grad_output` `[..., n]` over all rows in its dtype, and `grad_output` quantised."""
    rows = grad_output.reshape(-1, grad_output.shape[-1])
    return [rows.sum(dim=0, dtype=torch.float32).to(grad_output.dtype), quantize(grad_output, quantizer)]


def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    """Write the largest magnitude of `tensor` into `amax` (FP32, one element)."""
    amax.copy_(casts.amax(tensor).reshape(amax.shape))
