"""Activations of `transformer_engine_torch`: element-wise and gated, with gradients and bias gradients.

Rows are processed in blocks that stay in cache, in FP32, and rounded once. Formulas are in `activation_math`.

Time relative to PyTorch's `silu(a) * b` and its autograd, [2048, 2 x 1376], one thread, interleaved: forward 1.0 in
FP32, 1.06 in BF16 (which PyTorch rounds twice), backward 0.72 and 0.95. GELU: forward 0.64 (torch's tanh is slow),
backward 1.0.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_fp8.cpu.kernels import activation_math as math
from megatron_fp8.cpu.kernels.activation_math import Activation
from megatron_fp8.cpu.kernels.quantize import accumulator_dtype, deliver

__all__ = (
    "clamped_dswiglu clamped_swiglu dbias_dgelu dbias_dqgelu dbias_drelu dbias_dsilu dbias_dsrelu dgeglu dgelu dglu "
    "dqgeglu dqgelu dreglu drelu dsilu dsituglu dsreglu dsrelu dswiglu geglu gelu glu qgeglu qgelu reglu relu silu "
    "situglu sreglu srelu swiglu"
).split()

# Elements of the input held as FP32 at a time: 1 MiB, which stays in the L2 or L3 cache.
_BLOCK_ELEMENTS = 2**18

_Kernel = Callable[..., Any]


def _row_blocks(num_rows: int, width: int) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // max(1, width))
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


def _store_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`out = left * right`, rounded to out's dtype. `left` is scratch."""
    if out.dtype == left.dtype:
        torch.mul(left, right, out=out)
    else:
        out.copy_(left.mul_(right))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _named(kernel: _Kernel, name: str, doc: str) -> _Kernel:
    kernel.__name__, kernel.__qualname__, kernel.__doc__ = name, name, doc
    return kernel


def _unary_forward(name: str, activation: Activation) -> _Kernel:
    def forward(input: torch.Tensor, quantizer: Any) -> Any:
        rows = _rows(input)
        out = torch.empty(rows.shape, dtype=accumulator_dtype(quantizer, input.dtype), device=input.device)
        for block in _row_blocks(*rows.shape):
            out[block].copy_(activation.value(rows[block].float()))
        return deliver(out.view(input.shape), input.dtype, quantizer)

    doc = f"""`y = {activation.formula}`.

    input: `[..., n]` FP32, BF16 or FP16. Returns y of the same shape and dtype, or quantized by `quantizer`.
    """
    return _named(forward, name, doc)


def _unary_gradient(
    grad: torch.Tensor, input: torch.Tensor, activation: Activation, dtype: torch.dtype
) -> torch.Tensor:
    rows, grad_rows = _rows(input), _rows(grad)
    out = torch.empty(rows.shape, dtype=dtype, device=input.device)
    for block in _row_blocks(*rows.shape):
        slope = activation.value_and_slope(rows[block].float())[1]
        _store_product(out[block], slope, grad_rows[block].float())
    return out.view(input.shape)


def _unary_backward(name: str, activation: Activation) -> _Kernel:
    def backward(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
        dx = _unary_gradient(grad, fwd_input, activation, accumulator_dtype(quantizer, fwd_input.dtype))
        return deliver(dx, fwd_input.dtype, quantizer)

    doc = f"""`dx = grad * d/dx ({activation.formula})`.

    grad, fwd_input: `[..., n]`. Returns dx in fwd_input's shape and dtype, or quantized by `quantizer`.
    """
    return _named(backward, name, doc)


def _unary_backward_bias(name: str, activation: Activation) -> _Kernel:
    def backward(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list[Any]:
        dx = _unary_gradient(grad, fwd_input, activation, torch.float32)
        bias_gradient = _rows(dx).sum(dim=0).to(grad.dtype)
        return [bias_gradient, deliver(dx, fwd_input.dtype, quantizer)]

    doc = f"""`dx = grad * d/dx ({activation.formula})` and its sum over rows, taken in FP32 before rounding.

    grad, fwd_input: `[..., n]`. Returns `[dbias, dx]`: dbias `[n]` in grad's dtype, dx in fwd_input's shape and dtype
    or quantized by `quantizer`.
    """
    return _named(backward, name, doc)


def _parameters(defaults: dict[str, float], values: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    given = dict(zip(defaults, values, strict=False))
    if len(values) > len(defaults) or keywords.keys() - defaults.keys() or keywords.keys() & given.keys():
        raise TypeError(f"activation parameters {list(defaults)} expected, got {values} and {sorted(keywords)}")
    return defaults | given | keywords


def _with_signature(kernel: _Kernel, defaults: dict[str, float]) -> _Kernel:
    """`kernel` whose signature names the parameters of its activation."""
    signature = inspect.signature(kernel)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind not in kinds]
    extra = [inspect.Parameter(name, own[0].kind, default=value) for name, value in defaults.items()]
    kernel.__signature__ = signature.replace(parameters=[*own, *extra])  # type: ignore[attr-defined]
    return kernel


def _gated_forward(
    name: str, gate: Activation, linear: Activation | None = None, defaults: dict[str, float] | None = None
) -> _Kernel:
    def forward(input: torch.Tensor, quantizer: Any, *values: Any, **keywords: Any) -> Any:
        parameters = _parameters(defaults or {}, values, keywords)
        rows = _rows(input)
        half = rows.shape[1] // 2
        dtype = accumulator_dtype(quantizer, input.dtype)
        out = torch.empty((rows.shape[0], half), dtype=dtype, device=input.device)
        for block in _row_blocks(*rows.shape):
            x = rows[block].float()
            b = x[:, half:]
            right = b if linear is None else linear.value(b, **parameters)
            _store_product(out[block], gate.value(x[:, :half], **parameters), right)
        return deliver(out.view(*input.shape[:-1], half), input.dtype, quantizer)

    doc = f"""`y = f(a) * g(b)`, `[a, b]` the halves of the last axis, `f(x) = {gate.formula}`,
    `g(x) = {linear.formula if linear else "x"}`.

    input: `[..., 2n]` FP32, BF16 or FP16; parameters after `quantizer`: {", ".join(defaults or ["none"])}.
    Returns y `[..., n]` in input's dtype, or quantized by `quantizer`.
    """
    return _with_signature(_named(forward, name, doc), defaults or {})


def _gated_backward(
    name: str, gate: Activation, linear: Activation | None = None, defaults: dict[str, float] | None = None
) -> _Kernel:
    def backward(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, *values: Any, **keywords: Any) -> Any:
        parameters = _parameters(defaults or {}, values, keywords)
        rows, grad_rows = _rows(fwd_input), _rows(grad)
        half = rows.shape[1] // 2
        dtype = accumulator_dtype(quantizer, fwd_input.dtype)
        out = torch.empty(rows.shape, dtype=dtype, device=fwd_input.device)
        for block in _row_blocks(*rows.shape):
            x, dy = rows[block].float(), grad_rows[block].float()
            b = x[:, half:]
            value, slope = gate.value_and_slope(x[:, :half], **parameters)
            if linear is None:
                _store_product(out[block, half:], value, dy)
                _store_product(out[block, :half], slope.mul_(dy), b)
                continue
            right, right_slope = linear.value_and_slope(b, **parameters)
            _store_product(out[block, half:], value.mul_(dy), right_slope)
            _store_product(out[block, :half], slope.mul_(dy), right)
        return deliver(out.view(fwd_input.shape), fwd_input.dtype, quantizer)

    doc = f"""Gradient of `f(a) * g(b)`, `f(x) = {gate.formula}`, `g(x) = {linear.formula if linear else "x"}`.

    grad: `[..., n]`; fwd_input: `[..., 2n]`; parameters after `quantizer`: {", ".join(defaults or ["none"])}.
    Returns `[grad * f'(a) * g(b), grad * f(a) * g'(b)]` along the last axis, in fwd_input's shape and dtype, or
    quantized by `quantizer`.
    """
    return _with_signature(_named(backward, name, doc), defaults or {})


def _unary(name: str, activation: Activation) -> tuple[_Kernel, _Kernel, _Kernel]:
    return (
        _unary_forward(name, activation),
        _unary_backward(f"d{name}", activation),
        _unary_backward_bias(f"dbias_d{name}", activation),
    )


def _gated(name: str, gate: Activation) -> tuple[_Kernel, _Kernel]:
    return _gated_forward(name, gate), _gated_backward(f"d{name}", gate)


gelu, dgelu, dbias_dgelu = _unary("gelu", math.GELU)
qgelu, dqgelu, dbias_dqgelu = _unary("qgelu", math.QGELU)
relu, drelu, dbias_drelu = _unary("relu", math.RELU)
srelu, dsrelu, dbias_dsrelu = _unary("srelu", math.SRELU)
silu, dsilu, dbias_dsilu = _unary("silu", math.SILU)
geglu, dgeglu = _gated("geglu", math.GELU)
glu, dglu = _gated("glu", math.SIGMOID)
qgeglu, dqgeglu = _gated("qgeglu", math.QGELU)
reglu, dreglu = _gated("reglu", math.RELU)
sreglu, dsreglu = _gated("sreglu", math.SRELU)
swiglu, dswiglu = _gated("swiglu", math.SILU)

_SITU = (math.SITU_GATE, math.SITU_LINEAR, {"beta1": 4.0, "beta2": 25.0})
situglu, dsituglu = _gated_forward("situglu", *_SITU), _gated_backward("dsituglu", *_SITU)
_CLAMPED = (math.CLAMPED_SWISH, math.CLAMPED_LINEAR, {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0})
clamped_swiglu = _gated_forward("clamped_swiglu", *_CLAMPED)
clamped_dswiglu = _gated_backward("clamped_dswiglu", *_CLAMPED)
