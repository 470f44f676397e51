"""LayerNorm and RMSNorm of `transformer_engine_torch`, forward and backward, and what TE's refuse.

Statistics and arithmetic are FP32 whatever the input dtype, and results are rounded once, as in TE's CUDA kernels.
`sm_margin` limits GPU multiprocessors and is ignored. Sources of the checks: TE's `ln_api.cpp` and `rmsnorm_api.cpp`,
`normalization/common.h`, and the kernels that it registers.

Time relative to PyTorch's norms and their autograd, [2048, 512], one thread, interleaved: RMSNorm forward 0.64 in FP32
and 0.58 in BF16, backward 0.25 and 0.32; LayerNorm 1.0 (the same kernel).
"""

from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels.casts import torch_dtype
from megatron_fp8.cpu.kernels.quantize import deliver

__all__ = ["layernorm_bwd", "layernorm_fwd", "rmsnorm_bwd", "rmsnorm_bwd_add", "rmsnorm_fwd"]

_aten = torch.ops.aten
# Output dtypes by that of input and weight, which are the same in every kernel.
_OUTPUTS = {
    torch.float32: (torch.float32, torch.float16, torch.bfloat16),
    torch.float16: (torch.float16,),
    torch.bfloat16: (torch.bfloat16,),
}


def check_forward(x: Tensor, gamma: Tensor, beta: Tensor | None, epsilon: float, output: Any, quantizer: Any) -> None:
    """Raise RuntimeError for a forward pass that TE refuses. beta: None for RMSNorm; output: before `quantizer`."""
    if beta is not None and gamma.shape != beta.shape:
        raise RuntimeError(f"Gamma and Beta must have the same shape: {list(gamma.shape)}, {list(beta.shape)}")
    if beta is not None and gamma.dtype != beta.dtype:
        raise RuntimeError(f"Gamma and Beta must have the same dtype: {gamma.dtype}, {beta.dtype}")
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
    """Raise RuntimeError for a backward pass that TE refuses. TE copies non-contiguous tensors."""
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
            shape = list(statistic.shape)
            raise RuntimeError(f"{name} must be 1D tensor with shape (x.shape[0],): {shape}, {rows} rows")
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


def _gamma(weight: Tensor, zero_centered_gamma: bool) -> Tensor:
    """FP32 scale `[hidden]`; with `zero_centered_gamma` the parameter holds `scale - 1`."""
    gamma = weight.float()
    return gamma + 1 if zero_centered_gamma else gamma


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,  # noqa: ARG001
    zero_centered_gamma: bool,
) -> list[Any]:
    """`y = (x - mean) * rsigma * gamma + beta` over the last axis.

    input: `[..., hidden]`; weight, bias: `[hidden]`; otype: output dtype.
    Returns `[y, mean, rsigma]`; mean and rsigma are FP32 of shape `[rows]`.
    """
    check_forward(input, weight, bias, eps, otype, quantizer)
    hidden = weight.numel()
    dtype = torch_dtype(otype)
    # With FP32 weights aten keeps FP32 statistics for BF16 inputs; its output has the input's dtype, which must be the
    # result's to round once.
    rounds_in_kernel = quantizer is None and dtype == input.dtype
    x = input if rounds_in_kernel else input.float()
    y, mean, rsigma = _aten.native_layer_norm(x, [hidden], _gamma(weight, zero_centered_gamma), bias.float(), eps)
    return [deliver(y, dtype, quantizer, ln_out), mean.view(-1), rsigma.view(-1)]


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,  # noqa: ARG001
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """Gradients of `layernorm_fwd`: `[dx, dgamma, dbeta]`, dx in x's dtype, the others in gamma's.

    dz, x: `[..., hidden]`; mu, rsigma: FP32 `[rows]`.
    """
    check_backward(x, gamma, {"dz": dz}, {"mu": mu, "rsigma": rsigma})
    hidden = gamma.numel()
    stats_shape = (*x.shape[:-1], 1)
    scale = _gamma(gamma, zero_centered_gamma)
    dx, dgamma, dbeta = _aten.native_layer_norm_backward(
        dz.float().view(x.shape),
        x.float(),
        [hidden],
        mu.view(stats_shape),
        rsigma.view(stats_shape),
        scale,
        scale,  # in place of beta, whose values aten does not read
        [True, True, True],
    )
    return [dx.to(x.dtype), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)]


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,  # noqa: ARG001
    zero_centered_gamma: bool,
) -> list[Any]:
    """`y = x * rsigma * gamma`, `rsigma = 1 / sqrt(mean(x^2) + eps)` over the last axis.

    input: `[..., hidden]`; weight: `[hidden]`; otype: output dtype.
    Returns `[y, None, rsigma]`; rsigma is FP32 of shape `[rows]`.
    """
    check_forward(input, weight, None, eps, otype, quantizer)
    hidden = weight.numel()
    x = input.float()
    # vector_norm reads x once and keeps no [rows, hidden] temporary.
    rsigma = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    rsigma.square_().div_(hidden).add_(eps).rsqrt_()
    y = torch.mul(x, rsigma) if x is input else x.mul_(rsigma)
    y.mul_(_gamma(weight, zero_centered_gamma))
    return [deliver(y, torch_dtype(otype), quantizer, ln_out), None, rsigma.view(-1)]


def _rmsnorm_gradients(dz: Tensor, x: Tensor, rsigma: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 `(dx, dgamma)`.

    `dx = rsigma * (g - xhat * mean(g * xhat))` with `g = dz * scale` and `xhat = x * rsigma`. aten's one-pass
    LayerNorm backward at mean 0 gives that minus `rsigma * mean(g)`, which is added back: one matrix-vector product and
    one pass instead of six passes over `[rows, hidden]`.
    """
    hidden = scale.numel()
    stats_shape = (*x.shape[:-1], 1)
    inverse = rsigma.view(stats_shape)
    dz = dz.float().view(x.shape)
    dx, dgamma, _ = _aten.native_layer_norm_backward(
        dz, x.float(), [hidden], torch.zeros_like(inverse), inverse, scale, None, [True, True, False]
    )
    mean_g = torch.matmul(dz, scale).view(stats_shape).mul_(inverse).div_(hidden)
    return dx.add_(mean_g), dgamma


def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,  # noqa: ARG001
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """Gradients of `rmsnorm_fwd`: `[dx, dgamma]`, dx in x's dtype, dgamma in gamma's.

    dz, x: `[..., hidden]`; rsigma: FP32 `[rows]`.
    """
    check_backward(x, gamma, {"dz": dz}, {"rsigma": rsigma})
    dx, dgamma = _rmsnorm_gradients(dz, x, rsigma, _gamma(gamma, zero_centered_gamma))
    return [dx.to(x.dtype), dgamma.to(gamma.dtype)]


def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,  # noqa: ARG001
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """`rmsnorm_bwd` with the residual branch's gradient `add` (x's shape) added to dx before rounding."""
    check_backward(x, gamma, {"dz": dz, "add": add}, {"rsigma": rsigma})
    dx, dgamma = _rmsnorm_gradients(dz, x, rsigma, _gamma(gamma, zero_centered_gamma))
    return [dx.add_(add.view(x.shape)).to(x.dtype), dgamma.to(gamma.dtype)]
