"""The scalar functions behind TE's activations (names and constants of its `util/math.h`): value, and value with slope.

Every function takes an FP32 tensor with any strides and returns new FP32 tensors of its shape. Extra keyword arguments
are the activation's parameters.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_GELU_LINEAR = 0.79788456  # sqrt(2 / pi)
_GELU_CUBIC = 0.03567741  # 0.044715 * sqrt(2 / pi)
_QGELU_ALPHA = 1.702


@dataclass(frozen=True)
class Activation:
    """`value(x)` and `value_and_slope(x)`; `formula` is for docstrings."""

    formula: str
    value: Callable[..., torch.Tensor]
    value_and_slope: Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _swish(x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    return torch.nn.functional.silu(x) if alpha == 1.0 else torch.sigmoid_(x * alpha).mul_(x)


def _swish_and_slope(x: torch.Tensor, alpha: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    # One sigmoid costs as much as five products here, so value and slope share it.
    gate = torch.sigmoid(x) if alpha == 1.0 else torch.sigmoid_(x * alpha)
    value = gate * x
    slope = torch.addcmul(value, value, gate, value=-1)  # x * s * (1 - s)
    return value, gate.add_(slope, alpha=alpha)


def _gelu_argument(x: torch.Tensor) -> torch.Tensor:
    """`2 * sqrt(2/pi) * (1 + 0.044715 x^2)`: the factor of x inside the sigmoid form of tanh-GELU."""
    return x.square().mul_(2 * _GELU_CUBIC).add_(2 * _GELU_LINEAR)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    # 0.5 * (1 + tanh(u)) == sigmoid(2u); torch's CPU tanh takes 3.6 times as long as its sigmoid, and the
    # sigmoid keeps precision in the negative tail where 1 + tanh(u) cancels.
    return _gelu_argument(x).mul_(x).sigmoid_().mul_(x)


def _gelu_and_slope(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    argument = _gelu_argument(x)
    gate = torch.sigmoid_(argument * x)
    value = gate * x
    argument.mul_(3).sub_(4 * _GELU_LINEAR)  # d(argument * x) / dx
    curvature = torch.addcmul(value, value, gate, value=-1)
    return value, gate.addcmul_(curvature, argument)


def _relu_and_slope(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.relu(x), (x > 0).float()


def _srelu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square_()


def _srelu_and_slope(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positive = torch.relu(x)
    return positive.square(), positive.mul_(2)


def _sigmoid_and_slope(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    value = torch.sigmoid(x)
    return value, torch.addcmul(value, value, value, value=-1)


def _clamped_swish(x: torch.Tensor, limit: float, alpha: float, **_: Any) -> torch.Tensor:
    return _swish(x.clamp(max=limit), alpha)


def _clamped_swish_and_slope(
    x: torch.Tensor, limit: float, alpha: float, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    value, slope = _swish_and_slope(x.clamp(max=limit), alpha)
    return value, slope.mul_(x <= limit)


def _clamped_linear(x: torch.Tensor, limit: float, glu_linear_offset: float, **_: Any) -> torch.Tensor:
    return x.clamp(-limit, limit).add_(glu_linear_offset)


def _clamped_linear_and_slope(
    x: torch.Tensor, limit: float, glu_linear_offset: float, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _clamped_linear(x, limit, glu_linear_offset), (x.abs() <= limit).float()


def _soft_cap(x: torch.Tensor, beta: float) -> torch.Tensor:
    return (x / beta).tanh_().mul_(beta)


def _soft_cap_and_slope(x: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    ratio = (x / beta).tanh_()
    return ratio * beta, 1 - ratio.square_()


def _situ_gate(x: torch.Tensor, beta1: float, **_: Any) -> torch.Tensor:
    return _soft_cap(x, beta1).mul_(torch.sigmoid(x))


def _situ_gate_and_slope(x: torch.Tensor, beta1: float, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    capped, slope = _soft_cap_and_slope(x, beta1)
    gate, gate_slope = _sigmoid_and_slope(x)
    return capped * gate, slope.mul_(gate).addcmul_(capped, gate_slope)


def _situ_linear(x: torch.Tensor, beta2: float, **_: Any) -> torch.Tensor:
    return _soft_cap(x, beta2)


def _situ_linear_and_slope(x: torch.Tensor, beta2: float, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _soft_cap_and_slope(x, beta2)


GELU = Activation("x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))", _gelu, _gelu_and_slope)
QGELU = Activation(
    "x sigmoid(1.702 x)",
    functools.partial(_swish, alpha=_QGELU_ALPHA),
    functools.partial(_swish_and_slope, alpha=_QGELU_ALPHA),
)
RELU = Activation("max(x, 0)", torch.relu, _relu_and_slope)
SRELU = Activation("max(x, 0)^2", _srelu, _srelu_and_slope)
SILU = Activation("x sigmoid(x)", _swish, _swish_and_slope)
SIGMOID = Activation("sigmoid(x)", torch.sigmoid, _sigmoid_and_slope)
CLAMPED_SWISH = Activation("c sigmoid(alpha c), c = min(x, limit)", _clamped_swish, _clamped_swish_and_slope)
CLAMPED_LINEAR = Activation("clamp(x, -limit, limit) + glu_linear_offset", _clamped_linear, _clamped_linear_and_slope)
SITU_GATE = Activation("beta1 tanh(x/beta1) sigmoid(x)", _situ_gate, _situ_gate_and_slope)
SITU_LINEAR = Activation("beta2 tanh(x/beta2)", _situ_linear, _situ_linear_and_slope)
