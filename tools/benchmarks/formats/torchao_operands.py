"""Owns the measurement of what torchao's quantization does to the operands of its linear layers' GEMMs.

Hooks take the operands, torchao's own functions cast them once more with the settings of the layer, and the result is
compared with what it was made of. The computation itself is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.formats.work import OperandNoise
from megatron_fp8.precision.tensor_health import TensorHealth, quantization_sums

# The plain model's names, and the short ones of the comparison.
_LINEARS = {"qkv": "qkv", "proj": "proj", "gate_up": "fc1", "down": "fc2"}
# The setting of each operand's cast for the first GEMM that reads it, and the dimension that has a scale of its own
# for each of its other indices: the one that this GEMM sums over.
_CASTS = {"input": "cast_config_input", "weight": "cast_config_weight", "grad_output": "cast_config_grad_output"}
_SUMMED = -1


class OperandMeter:
    """Measures the operands of `linears`, torchao's `Float8Linear`s by name, until `read`."""

    def __init__(self, linears: Mapping[str, nn.Module]) -> None:
        self._sums: dict[str, Tensor] = {}
        self._hooks = [module.register_forward_hook(self._hook(_short_name(name))) for name, module in linears.items()]

    def read(self) -> dict[str, OperandNoise]:
        """What was measured, by operand, summed over the micro-batches; takes the hooks away."""
        for hook in self._hooks:
            hook.remove()
        health = {name: TensorHealth.from_sums(sums.tolist()) for name, sums in self._sums.items()}
        return {name: OperandNoise(found.sqnr_db, found.clipped, found.flushed) for name, found in health.items()}

    def _hook(self, linear: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._add(linear, "input", inputs[0], module)
            if f"{linear}/weight" not in self._sums:
                self._add(linear, "weight", module.get_parameter("weight"), module)
            output.register_hook(lambda gradient: self._add(linear, "grad_output", gradient, module))

        return hook

    @torch.no_grad()
    def _add(self, linear: str, kind: str, tensor: Tensor, module: Any) -> None:
        name = f"{linear}/{kind}"
        sums = quantization_sums(*quantize(tensor.reshape(-1, tensor.shape[-1]), module.config, kind))
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums


def _short_name(name: str) -> str:
    """`layers.0.gate_up` -> `layers.0/fc1`."""
    block, linear = name.rsplit(".", 1)
    return f"{block}/{_LINEARS[linear]}"


def quantize(tensor: Tensor, config: Any, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """FP32 numbers, those that are left of them, and which of these are the format's largest.

    `[rows, columns]` cast by torchao for its first GEMM, with the layer's `Float8LinearConfig`.
    """
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic

    cast = getattr(config, _CASTS[kind])
    # In FP32: scales are the same, and `to_original_precision` would round to BF16 what the GEMM multiplies in FP32.
    x = tensor.detach().float()
    result = hp_tensor_to_float8_dynamic(
        x,
        cast.target_dtype,
        None,
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(_SUMMED, cast.scaling_granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
    at_limit = result._data.float().abs() == torch.finfo(cast.target_dtype).max
    return x, result.to_original_precision(), at_limit
