"""One run of torchao's FP8 training: the plain-PyTorch model with its blocks' linear layers converted.

FP32 parameters, BF16 by autocast, AdamW, clipping and learning rates as in the other modes. torchao computes its GEMMs
itself on GPUs and emulates them where there is none; there the head's and attention's are FP32 GEMMs of BF16 values, as
in this project's own runs on CPUs, since torch's BF16 GEMM is up to hundreds of times slower on CPUs without BF16
instructions. Operands are measured by hooks that take them and cast them once more by torchao's own functions: the
computation itself is left as it is. Must not import Transformer Engine or Megatron Core.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.plain_model import PlainGPT
from benchmarks.plain_run import PlainRun, accelerator
from benchmarks.runs import Samples, StepSample
from megatron_fp8.config.schema import Config
from megatron_fp8.cpu import installed
from megatron_fp8.precision.tensor_health import TensorHealth, quantization_sums

_COMPUTE_DTYPE = torch.bfloat16
# The setting of each operand's cast for the first GEMM that reads it, and the dimension that has a scale of its own
# for each of its other indices: the one that this GEMM sums over.
_CASTS = {"input": "cast_config_input", "weight": "cast_config_weight", "grad_output": "cast_config_grad_output"}
_SUMMED = -1
# Logger, beginning of the message, and why it says nothing.
_SAYS_NOTHING = {
    # Compiled kernels for MXFP8 and sparsity on GPUs; float8 training uses torch's own GEMM, or the emulation.
    "torchao": "Failed to load ",
    # Said to torchao's authors about a call of theirs.
    "torch.utils._pytree": "<enum 'KernelPreference'> is an Enum subclass",
}


class TorchaoRun(PlainRun):
    """One process. `operands`: health of the GEMM operands in the last step that measured them."""

    def __init__(self, config: Config, samples: Samples, recipe: str) -> None:
        float8 = import_float8()
        emulate = accelerator().type == "cpu" or installed()
        settings = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        model = PlainGPT(config)
        float8.convert_to_float8_training(model, module_filter_fn=_is_in_block, config=settings)
        self._linears = {
            # As in `layers.0/qkv`.
            "/".join(name.rsplit(".", 1)): module
            for name, module in model.named_modules()
            if hasattr(module, "linear_mm_config")
        }
        if emulate:
            _compute_as_under_autocast(model, self._linears.values())
        super().__init__(config, samples, model, autocast=not emulate)
        self.operands: Mapping[str, TensorHealth] = {}

    def step(self, *, measure: bool = False) -> StepSample:
        """One step, which is never skipped; `measure`: look at the operands."""
        meter = OperandMeter(self._linears) if measure else None
        sample = super().step()
        if meter is not None:
            self.operands = meter.read()
        return sample


def _is_in_block(module: nn.Module, name: str) -> bool:  # noqa: ARG001 - torchao calls it with both
    """Embedding and head stay as they are, as in the other modes."""
    return name.startswith("layers.")


class _Rounded(nn.Module):
    """Rounds a tensor, and in the backward pass its gradient, to BF16, and leaves it in FP32."""

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor.to(_COMPUTE_DTYPE).float()


def _compute_as_under_autocast(model: PlainGPT, linears: Iterable[nn.Module]) -> None:
    """BF16 where autocast has it, without torch's BF16 GEMMs."""
    rounded = _Rounded()
    for module in linears:
        # Its output has the input's dtype.
        module.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(_COMPUTE_DTYPE),))
    for block in model.layers:
        block.get_submodule("qkv").register_forward_hook(lambda *call: call[-1].float())
    parametrize.register_parametrization(model.head, "weight", rounded)
    model.head.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    model.head.register_forward_hook(lambda *call: rounded(call[-1]))


class OperandMeter:
    """Measures the operands of `linears`, torchao's `Float8Linear`s by name, until `read`."""

    def __init__(self, linears: Mapping[str, nn.Module]) -> None:
        self._sums: dict[str, Tensor] = {}
        self._hooks = [module.register_forward_hook(self._hook(name)) for name, module in linears.items()]

    def read(self) -> dict[str, TensorHealth]:
        """What was measured, by operand, summed over the micro-batches; takes the hooks away."""
        for hook in self._hooks:
            hook.remove()
        return {name: TensorHealth.from_sums(sums.tolist()) for name, sums in self._sums.items()}

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


def import_float8() -> ModuleType:
    """The module `torchao.float8`."""
    with _without_warnings():
        return import_module("torchao.float8")


@contextmanager
def _without_warnings() -> Iterator[None]:
    filters = [(logging.getLogger(name), _starts_otherwise(start)) for name, start in _SAYS_NOTHING.items()]
    for logger, keep in filters:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger, keep in filters:
            logger.removeFilter(keep)


def _starts_otherwise(start: str) -> logging.Filter:
    class StartsOtherwise(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return not record.getMessage().startswith(start)

    return StartsOtherwise()
