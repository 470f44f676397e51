"""Owns one run of torchao's FP8 training: the plain-PyTorch model with its blocks' linear layers converted.

FP32 parameters, BF16 by autocast, AdamW, clipping and learning rates as in the other modes. torchao computes its GEMMs
itself on GPUs and emulates them where there is none; there the head's and attention's are FP32 GEMMs of BF16 values, as
in this project's own runs on CPUs, since torch's BF16 GEMM is up to hundreds of times slower on CPUs without BF16
instructions. Must not import Transformer Engine or Megatron Core.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.formats.samples import Samples
from benchmarks.formats.torchao_import import import_float8
from benchmarks.formats.torchao_operands import OperandMeter
from benchmarks.formats.work import OperandNoise
from benchmarks.speed.plain_model import PlainGPT
from benchmarks.speed.plain_run import plain_optimizer
from megatron_fp8.config.schema import Config
from megatron_fp8.cpu import installed

_COMPUTE_DTYPE = torch.bfloat16


class TorchaoRun:
    """One process; `step` is called once for each step of the config."""

    def __init__(self, config: Config, samples: Samples, recipe: str) -> None:
        float8 = import_float8()
        self._device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        emulate = self._device.type == "cpu" or installed()
        settings = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        model = PlainGPT(config)
        float8.convert_to_float8_training(model, module_filter_fn=_is_in_block, config=settings)
        self.model = model.to(self._device)
        self._autocast = not emulate
        if not self._autocast:
            _compute_as_under_autocast(self.model, self._linears().values())
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._config = config
        self._samples = samples
        self._optimizer = plain_optimizer(self.model, config.optimizer)
        self._num_steps = 0
        self.operands: dict[str, OperandNoise] = {}

    def step(self, *, measure: bool) -> tuple[float, bool]:
        """Mean loss in nats per token before the step, and False: no step is skipped. `measure`: look at operands."""
        meter = OperandMeter(self._linears()) if measure else None
        loss = self._forward_backward()
        if meter is not None:
            self.operands = meter.read()
        for group in self._optimizer.param_groups:
            group["lr"] = self._samples.learning_rates[self._num_steps]
        if self._config.optimizer.clip_grad > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.optimizer.clip_grad)
        self._optimizer.step()
        self._num_steps += 1
        return float(loss), False

    def close(self) -> None:
        """Nothing was started."""

    def _forward_backward(self) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        training = self._config.training
        first = self._num_steps * training.global_batch_size
        tokens, labels = (
            self._samples.fields[name][first : first + training.global_batch_size].to(self._device)
            for name in ("tokens", "labels")
        )
        micro_batches = list(
            zip(tokens.split(training.micro_batch_size), labels.split(training.micro_batch_size), strict=True)
        )
        total = torch.zeros((), device=self._device)
        for inputs, targets in micro_batches:
            with torch.autocast(self._device.type, dtype=_COMPUTE_DTYPE, enabled=self._autocast):
                loss = self.model(inputs, targets) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        return total

    def _linears(self) -> dict[str, nn.Module]:
        """The converted layers by name."""
        return {name: module for name, module in self.model.named_modules() if hasattr(module, "linear_mm_config")}


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
