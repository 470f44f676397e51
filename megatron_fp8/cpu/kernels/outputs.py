"""How a normalization or activation kernel hands over its FP32 result.

Owns the one rounding at a kernel's end: to a high-precision dtype, or to FP8 through the quantizer.
Must not know which kernel computed the result.
"""

from typing import Any

import torch

from megatron_fp8.cpu.kernels.dtypes import torch_dtype
from megatron_fp8.cpu.kernels.quantize import quantize


def high_precision_dtype(te_dtype: Any) -> torch.dtype:
    """The torch dtype that a `torch.dtype` or a TE `DType` (enum or integer) stands for."""
    return te_dtype if isinstance(te_dtype, torch.dtype) else torch_dtype(te_dtype)


def _casts_inside_kernel(quantizer: Any) -> bool:
    """Whether TE's CUDA kernel applies this quantizer to its FP32 accumulators (delayed scaling does)."""
    # TE imports this package's extension first, so its classes exist only once a kernel runs.
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    return isinstance(quantizer, Float8Quantizer)


def accumulator_dtype(quantizer: Any, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel hands its result to `deliver`: FP32 where the quantizer sees FP32."""
    return torch.float32 if quantizer is not None and _casts_inside_kernel(quantizer) else dtype


def deliver(result: torch.Tensor, dtype: torch.dtype, quantizer: Any = None, out: Any = None) -> Any:
    """Round `result` once and return it as the kernel's output.

    result: FP32 or `dtype`, any shape; scratch that the caller gives away.
    dtype: high-precision output dtype, and the nominal dtype of a quantized output.
    quantizer: None, or the TE quantizer of the consumer. Delayed scaling quantizes FP32 values and takes
        their amax, as TE's fused kernels do; the other quantizers see values rounded to `dtype` first.
    out: None, or the tensor to write (quantized when `quantizer` is given).
    """
    if quantizer is None:
        if out is None:
            return result.to(dtype)
        return out.copy_(result)
    if not _casts_inside_kernel(quantizer):
        return quantize(result.to(dtype), quantizer, out)
    if out is None:
        out = quantizer.make_empty(result.shape, dtype=dtype, device=result.device)
    return quantize(result, quantizer, out)
