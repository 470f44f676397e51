"""What Transformer Engine's LayerNorm and RMSNorm refuse, with its words. Must not know how a norm is computed.

Sources: TE's `ln_api.cpp` and `rmsnorm_api.cpp` (checks of each argument), `normalization/common.h`, and the kernels
that `ln_fwd_cuda_kernel.cu`, `rmsnorm_fwd_cuda_kernel.cu` and their backward passes register.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels.dtypes import torch_dtype

# Output dtypes by that of input and weight, which are the same in every kernel.
_OUTPUTS = {
    torch.float32: (torch.float32, torch.float16, torch.bfloat16),
    torch.float16: (torch.float16,),
    torch.bfloat16: (torch.bfloat16,),
}


def check_forward(x: Tensor, gamma: Tensor, beta: Tensor | None, epsilon: float, output: Any, quantizer: Any) -> None:
    """Raise RuntimeError for a forward pass that TE has no kernel for.

    beta: None for RMSNorm; output: TE's dtype of the result, before `quantizer` where there is one.
    """
    if beta is not None and gamma.shape != beta.shape:
        raise RuntimeError(f"Gamma and Beta must have the same shape: {list(gamma.shape)}, {list(beta.shape)}")
    if beta is not None and gamma.dtype != beta.dtype:
        raise RuntimeError(
            f"Gamma and Beta must have the same dtype. Gamma dtype: {gamma.dtype}, Beta dtype: {beta.dtype}"
        )
    _check_hidden_size(x, gamma)
    if epsilon < 0:
        raise RuntimeError(f"Epsilon must be non-negative: {epsilon}")
    for name, tensor in (("x", x), ("gamma", gamma), *([] if beta is None else [("beta", beta)])):
        if not tensor.is_contiguous():
            raise RuntimeError(f"{name} is not contiguous; TE's norms read its memory in order")
    _check_kernel(x, gamma, torch_dtype(output))
    if type(quantizer).__name__ == "Float8Quantizer" and torch_dtype(quantizer.dtype) != torch.float8_e4m3fn:
        raise RuntimeError(f"Unavailable kernel for this normalization config: the result is {quantizer.dtype}")


def check_backward(x: Tensor, gamma: Tensor, gradients: dict[str, Tensor], statistics: dict[str, Tensor]) -> None:
    """Raise RuntimeError for a backward pass that TE refuses; TE copies what is not contiguous.

    gradients: of the result, and what is added, by name; statistics: of rows, by name.
    """
    for name, gradient in gradients.items():
        if gradient.dtype != gamma.dtype:
            raise RuntimeError(f"{name} is {gradient.dtype}, gamma {gamma.dtype}: they must have the same dtype")
        if gradient.shape != x.shape:
            raise RuntimeError(f"{name} has shape {list(gradient.shape)}, x {list(x.shape)}: they must be the same")
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    for name, statistic in statistics.items():
        if statistic.dtype != torch.float32:
            raise RuntimeError(f"{name} must be a float32 tensor, not {statistic.dtype}")
        if statistic.numel() != rows:
            raise RuntimeError(
                f"{name} must be 1D tensor with shape (x.shape[0],): {list(statistic.shape)}, {rows} rows"
            )
    _check_hidden_size(x, gamma)
    _check_kernel(x, gamma, gamma.dtype)


def _check_hidden_size(x: Tensor, gamma: Tensor) -> None:
    if tuple(gamma.shape) != (x.shape[-1],):
        raise RuntimeError(f"Gamma must have the same hidden size: {list(gamma.shape)} for x of {list(x.shape)}")


def _check_kernel(x: Tensor, gamma: Tensor, output: torch.dtype) -> None:
    if gamma.dtype != x.dtype or output not in _OUTPUTS.get(x.dtype, ()):
        raise RuntimeError(
            f"Unavailable kernel for this normalization config: input {x.dtype}, weight {gamma.dtype}, result {output}"
        )
