"""Owns the measured run of the project's own training step: the parts of `train/setup.py` on fixed tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.speed.work import StepSample, fixed_tokens
from megatron_fp8 import device as devices
from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.schema import Config
from megatron_fp8.parallel.process_group import init_process_group, world_size
from megatron_fp8.report.library_warnings import hide_meaningless_warnings
from megatron_fp8.report.record import Recorder

# More steps than anybody measures: the loader must not end.
_NUM_STEPS = 10_000_000


class OurRun:
    """This rank's share of the run; every rank of the job makes one, and all of them step together."""

    def __init__(self, config: Config) -> None:
        self._device = devices.prepare()
        hide_meaningless_warnings(self._device.emulated)
        # They look for CUDA when imported.
        from megatron_fp8.train.setup import build_parts

        if not torch.distributed.is_initialized():
            init_process_group(self._device.collective_backend, config.parallel.distributed_timeout_minutes)
        layout = derive_layout(config, world_size(), None)
        self.parts = build_parts(config, layout, layout.vocab_size, self._device, Recorder([]))
        self.num_parameters = layout.num_parameters
        self._tokens_per_step = layout.tokens_per_global_batch
        samples = RepeatedBatch(fixed_tokens(config))
        self._loader = self.parts.batches.loader(samples, _NUM_STEPS * config.training.global_batch_size)
        self._iterators = self._loader.iterators(len(self.parts.chunks))

    def step(self) -> StepSample:
        """One step as the loop makes it, loss reduction included."""
        parts = self.parts
        started = time.perf_counter()
        result = parts.stepper.train(parts.optimizer, self._iterators, parts.batches.shape)
        parts.schedule.step(1)
        loss = result.loss.reduced_mean()
        self._device.synchronize()
        return StepSample(time.perf_counter() - started, self._tokens_per_step, loss)

    def short_step(self) -> StepSample:
        """A whole step."""
        return self.step()

    def peak_memory_bytes(self) -> int:
        """On CPUs the peak of the whole process, on GPUs that of the allocator."""
        return self._device.peak_memory_bytes()

    def close(self) -> None:
        """End the loader's threads and leave the process group."""
        self._loader.close()
        torch.distributed.destroy_process_group()


class RepeatedBatch:
    """A dataset that is one global batch, `[global_batch, s + 1]`, again and again."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        num_tokens = tokens.shape[1] - 1
        self._mask = torch.ones(num_tokens)
        self._positions = torch.arange(num_tokens)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        sample = self._tokens[index % len(self._tokens)]
        return {
            "tokens": sample[:-1],
            "labels": sample[1:],
            "loss_mask": self._mask,
            "position_ids": self._positions,
        }
