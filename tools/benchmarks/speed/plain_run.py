"""Owns the plain-PyTorch training loop: gradient accumulation, autocast, clipping, fused AdamW. One process.

Tuned as far as a user would: FP32 parameters and `torch.autocast` for BF16, fused AdamW, decay for matrices only.
Must not import Transformer Engine or Megatron Core.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed.plain_model import PlainGPT
from benchmarks.speed.work import StepSample, fixed_tokens
from megatron_fp8.config.schema import Config, OptimizerConfig
from megatron_fp8.cpu import peak_resident_bytes


class PlainRun:
    """The plain loop in `fp32` or `bf16` (autocast) on this machine's accelerator, or its CPU where there is none."""

    def __init__(self, config: Config, precision: str) -> None:
        self._device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self._autocast = precision == "bf16"
        self._config = config
        self._tokens = fixed_tokens(config).to(self._device)
        self.model = PlainGPT(config).to(self._device)
        self._optimizer = plain_optimizer(self.model, config.optimizer)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> StepSample:
        """One global batch in micro-batches, and the optimizer."""
        started = time.perf_counter()
        loss = self._forward_backward(self._tokens, self._config.training.micro_batch_size)
        if self._config.optimizer.clip_grad > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.optimizer.clip_grad)
        self._optimizer.step()
        return self._sample(started, self._tokens, loss)

    def short_step(self) -> StepSample:
        """Forward and backward of one sample; the model stays as it was."""
        started = time.perf_counter()
        loss = self._forward_backward(self._tokens[:1], 1)
        return self._sample(started, self._tokens[:1], loss)

    def peak_memory_bytes(self) -> int:
        """On CPUs the peak of the whole process, on accelerators that of the allocator."""
        if self._device.type == "cpu":
            return peak_resident_bytes()
        return int(torch.accelerator.max_memory_allocated())

    def close(self) -> None:
        """Nothing was started."""

    def _forward_backward(self, tokens: Tensor, micro_batch_size: int) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        micro_batches = tokens.split(micro_batch_size)
        total = torch.zeros((), device=self._device)
        for batch in micro_batches:
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._autocast):
                loss = self.model(batch[:, :-1], batch[:, 1:]) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        return total

    def _sample(self, started: float, tokens: Tensor, loss: Tensor) -> StepSample:
        value = float(loss)
        # Reading the loss waits for the device's forward passes only, so wait for the rest too.
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return StepSample(time.perf_counter() - started, tokens.shape[0] * (tokens.shape[1] - 1), value)


def plain_optimizer(model: nn.Module, settings: OptimizerConfig) -> torch.optim.AdamW:
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
