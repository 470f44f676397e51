"""Per-tensor scaled FP8: delayed and current scaling into TE's `Float8Tensor` and its storage.

Columnwise data (`_transpose`, `[last, *rest]`) is a view of the rowwise bytes: the GEMM here reads any layout, and a
view costs nothing and cannot become stale. TE's Python communicates only rowwise bytes with these quantizers
(`distributed._all_gather_fp8`, the distributed optimizer's shards) and transposes afterwards. A tensor with columnwise
usage alone keeps only the view.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels.casts import FP8_MAX, decode_fp8, encode_fp8, scale_from_amax, tensor_amax, torch_dtype


def quantize_float8(tensor: Tensor, quantizer: Any, output: Any, noop: bool) -> Any:
    """Quantize `tensor`, FP32, BF16 or FP16 of any shape, into `output` or a new tensor with the quantizer's usages.

    Delayed scaling uses the quantizer's scale and raises `quantizer.amax`, unless that is empty, to the tensor's amax.
    Current scaling computes the scale from the tensor's amax, maximized over the quantizer's group if it has one.
    `noop` leaves values and amax unchanged.
    """
    if output is None:
        output = empty_float8(quantizer, tensor.shape, tensor.dtype)
    else:
        _set_usages(output, quantizer)
    if noop or tensor.numel() == 0:
        return output
    peak = tensor_amax(tensor)
    scale = _scale(peak, quantizer)
    data = rowwise_bytes(output)
    encode_fp8(tensor.reshape(data.shape), scale, torch_dtype(quantizer.dtype), out=data, bound=float(peak))
    output._scale_inv.copy_(torch.reciprocal(scale).reshape(output._scale_inv.shape))
    return output


def empty_float8(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any = "cuda") -> Any:
    """A tensor of nominal `dtype` with undefined bytes; its scale is the quantizer's, or 1 with current scaling."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    data = torch.empty(tuple(shape), dtype=torch.uint8, device=device)
    scale = getattr(quantizer, "scale", None)
    scale_inv = torch.ones(1, device=device) if scale is None else torch.reciprocal(scale).reshape(1).to(data.device)
    parts = {
        "data": data if quantizer.rowwise_usage else None,
        "data_transpose": columnwise_view(data) if quantizer.columnwise_usage else None,
        "fp8_scale_inv": scale_inv,
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(fake_dtype=dtype, **parts)
    return Float8Tensor(shape=data.shape, dtype=dtype, device=data.device, **parts)


def float8_values(storage: Any, columnwise: bool) -> tuple[Tensor, float]:
    """FP32 values `[*rest, last]`, to be multiplied with the factor returned; the same for both usages.

    Raises RuntimeError if the tensor has no data.
    """
    del columnwise
    values, factor = decode_fp8(rowwise_bytes(storage), torch_dtype(storage._fp8_dtype))
    return values, factor * float(storage._scale_inv)


def dequantize_float8(storage: Any, dtype: torch.dtype) -> Tensor:
    """`fp8 * scale_inv` in FP32, rounded once to `dtype`."""
    values, factor = decode_fp8(rowwise_bytes(storage), torch_dtype(storage._fp8_dtype))
    # One by one, because the product of the factors may overflow.
    return values.mul_(factor).mul_(storage._scale_inv.reshape(())).to(dtype)


def columnwise_view(data: Tensor) -> Tensor:
    """`[last, *rest]` as a view of `[*rest, last]`."""
    return data.movedim(-1, 0) if data.dim() > 1 else data


def rowwise_bytes(storage: Any) -> Tensor:
    """The bytes in logical order, from whichever usage the tensor has."""
    if storage._data is not None:
        return storage._data
    transpose = storage._transpose
    if transpose is None or storage._transpose_invalid:
        raise RuntimeError("FP8 tensor has neither rowwise nor valid columnwise data")
    return transpose.movedim(0, -1) if transpose.dim() > 1 else transpose


def _set_usages(output: Any, quantizer: Any) -> None:
    """Give `output` the quantizer's dtype and usages, keeping its bytes, as TE's extension does."""
    if output._data is None:
        output._transpose_invalid = False
    data = rowwise_bytes(output)
    output._data = data if quantizer.rowwise_usage else None
    output._transpose = columnwise_view(data) if quantizer.columnwise_usage else None
    output._transpose_invalid = not quantizer.columnwise_usage
    output._fp8_dtype = quantizer.dtype


def _scale(peak: Tensor, quantizer: Any) -> Tensor:
    """FP32 scale `[1]` for a tensor with amax `peak`, which delayed scaling records."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    if isinstance(quantizer, Float8Quantizer):
        if quantizer.amax.numel():
            torch.maximum(quantizer.amax, peak, out=quantizer.amax)
        return quantizer.scale
    reduced = peak.reshape(1)
    if quantizer.with_amax_reduction:
        reduced = reduced.clone()
        group = quantizer._canonicalized_amax_reduction_group()
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MAX, group=group)
    limit = FP8_MAX[torch_dtype(quantizer.dtype)]
    return scale_from_amax(reduced, limit, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
