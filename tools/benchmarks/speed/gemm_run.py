"""The ceiling: how fast this machine multiplies matrices of the model's shapes, and nothing else.

A step's forward, dgrad and wgrad GEMMs of the linear layers and the head, timed one by one with `torch.mm` on
operands that are ready in memory. Attention's products are not among them. Imports no Transformer Engine.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from benchmarks.plain_run import accelerator, peak_memory_bytes
from benchmarks.runs import StepSample
from megatron_fp8.config.layout import GemmShape, derive_layout
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.flops import step_gemms

# A short step multiplies one row of so many.
_SHORT_SHARE = 16


class GemmRun:
    """The GEMMs of one step in `fp32` or `bf16`; each shape is timed once and counted as often as a step has it."""

    num_parameters = None

    def __init__(self, config: Config, precision: str) -> None:
        self._device = accelerator()
        self._dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self._layout = derive_layout(config, 1, None)
        self._num_layers = config.model.num_layers

    def step(self) -> StepSample:
        """Seconds that a step's GEMMs take."""
        return self._sample(1)

    def short_step(self) -> StepSample:
        """The same for a part of the tokens."""
        return self._sample(min(_SHORT_SHARE, self._layout.tokens_per_microbatch))

    def peak_memory_bytes(self) -> int:
        """Of the whole process on CPUs."""
        return peak_memory_bytes(self._device)

    def close(self) -> None:
        """Nothing was started."""

    def _sample(self, share: int) -> StepSample:
        seconds = sum(
            count * self._timed_gemms(shape, shape.num_tokens // share)
            for shape, count in step_gemms(self._layout, self._num_layers)
        )
        return StepSample(seconds, self._layout.tokens_per_global_batch // share, None)

    def _timed_gemms(self, shape: GemmShape, num_tokens: int) -> float:
        """Seconds of the forward, the dgrad and the wgrad GEMM of one linear layer."""
        x = self._random(num_tokens, shape.in_features)
        weight = self._random(shape.out_features, shape.in_features)
        grad = self._random(num_tokens, shape.out_features)
        self._synchronize()
        started = time.perf_counter()
        torch.mm(x, weight.t())
        torch.mm(grad, weight)
        torch.mm(grad.t(), x)
        self._synchronize()
        return time.perf_counter() - started

    def _random(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=self._dtype, device=self._device)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
