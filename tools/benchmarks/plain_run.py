"""The plain-PyTorch training loop: gradient accumulation, autocast, clipping, fused AdamW. One process.

Tuned as far as a user would: FP32 parameters and `torch.autocast` for BF16, fused AdamW, decay for matrices only.
Must not import Transformer Engine or Megatron Core.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plain_model import PlainGPT
from benchmarks.runs import Samples, StepSample
from megatron_fp8.config.schema import Config, OptimizerConfig
from megatron_fp8.cpu import peak_resident_bytes


def accelerator() -> torch.device:
    """This machine's accelerator, or its CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


class PlainRun:
    """The plain loop on `model`; `autocast`: under BF16's."""

    def __init__(self, config: Config, samples: Samples, model: PlainGPT, *, autocast: bool) -> None:
        self.device = accelerator()
        self.model = model.to(self.device)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._autocast = autocast
        self._training = config.training
        self._clip_grad = config.optimizer.clip_grad
        self._tokens, self._labels = (samples.fields[name].to(self.device) for name in ("tokens", "labels"))
        self._learning_rates = samples.learning_rates
        self._optimizer = _optimizer(self.model, config.optimizer)
        self._num_steps = 0

    def step(self) -> StepSample:
        """One global batch in micro-batches, and the optimizer."""
        started = time.perf_counter()
        size = self._training.global_batch_size
        loss = self._forward_backward(self._num_steps * size % len(self._tokens), size, self._training.micro_batch_size)
        if self._learning_rates:
            for group in self._optimizer.param_groups:
                group["lr"] = self._learning_rates[self._num_steps]
        if self._clip_grad > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_grad)
        self._optimizer.step()
        self._num_steps += 1
        return self._sample(started, size, loss)

    def short_step(self) -> StepSample:
        """Forward and backward of one sample; the model stays as it was."""
        started = time.perf_counter()
        return self._sample(started, 1, self._forward_backward(0, 1, 1))

    def peak_memory_bytes(self) -> int:
        """On CPUs the peak of the whole process, on accelerators that of the allocator."""
        return peak_memory_bytes(self.device)

    def close(self) -> None:
        """Nothing was started."""

    def _forward_backward(self, first: int, num_samples: int, micro_batch_size: int) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        batch = slice(first, first + num_samples)
        tokens, labels = (values[batch].split(micro_batch_size) for values in (self._tokens, self._labels))
        total = torch.zeros((), device=self.device)
        for inputs, targets in zip(tokens, labels, strict=True):
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._autocast):
                loss = self.model(inputs, targets) / len(tokens)
            loss.backward()
            total += loss.detach()
        return total

    def _sample(self, started: float, num_samples: int, loss: Tensor) -> StepSample:
        value = float(loss)
        # Reading the loss waits for the device's forward passes only, so wait for the rest too.
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return StepSample(time.perf_counter() - started, num_samples * self._tokens.shape[1], value)


def plain_run(config: Config, samples: Samples, precision: str) -> PlainRun:
    """The plain model in `fp32`, or in `bf16` by autocast."""
    return PlainRun(config, samples, PlainGPT(config), autocast=precision == "bf16")


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process has held."""
    return peak_resident_bytes() if device.type == "cpu" else int(torch.accelerator.max_memory_allocated())


def _optimizer(model: nn.Module, settings: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW at the highest learning rate of the schedule; norms have no decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
