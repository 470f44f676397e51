"""What both benchmarks train: samples, what a step reports, and the project's own training step on these samples."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_fp8 import device as devices
from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.schema import Config
from megatron_fp8.parallel.process_group import init_process_group, world_size
from megatron_fp8.precision.tensor_health import TensorHealth
from megatron_fp8.report.library_warnings import hide_meaningless_warnings
from megatron_fp8.report.record import Recorder

_SEED = 20261129
# More steps than anybody measures: the loader must not end.
_MANY = 10_000_000


@dataclass(frozen=True)
class StepSample:
    """One step of one process. `loss`: nats per token before the step; None where there is none."""

    seconds: float
    num_tokens: int
    loss: float | None
    skipped: bool = False


class Run(Protocol):
    """A subject in its process. `num_parameters`: None where there is no model."""

    @property
    def num_parameters(self) -> int | None: ...

    def step(self) -> StepSample:
        """One whole step: a global batch forward and backward, clipping, the optimizer."""

    def short_step(self) -> StepSample:
        """The smallest piece of work that shows the speed: a whole step, or less that leaves the model as it was."""

    def peak_memory_bytes(self) -> int:
        """Most memory this process has held."""

    def close(self) -> None:
        """End what the run has started."""


@dataclass(frozen=True)
class Samples:
    """Samples by field of the loader, `[num_samples, s]`, to be read `num_epochs` times.

    `learning_rates`: of each step; empty where it stays the config's.
    """

    fields: Mapping[str, Tensor]
    learning_rates: Sequence[float] = ()
    num_epochs: int = 1

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        return {name: values[index % len(values)] for name, values in self.fields.items()}

    def __len__(self) -> int:
        return len(self.fields["tokens"]) * self.num_epochs

    @classmethod
    def load(cls, path: Path) -> Samples:
        """Read a file that `save` wrote."""
        saved = torch.load(path, weights_only=True)
        return cls(saved["fields"], saved["learning_rates"])

    def save(self, path: Path) -> None:
        """Write fields and learning rates."""
        torch.save({"fields": dict(self.fields), "learning_rates": list(self.learning_rates)}, path)


def repeated_batch(config: Config) -> Samples:
    """One global batch of random tokens; every step trains on it again."""
    generator = torch.Generator().manual_seed(_SEED)
    size = (config.training.global_batch_size, config.model.seq_length + 1)
    assert config.model.vocab_size is not None
    tokens = torch.randint(0, config.model.vocab_size, size, generator=generator)
    inputs = tokens[:, :-1]
    fields = {
        "tokens": inputs,
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(inputs.shape[1]).expand(inputs.shape),
        "position_ids": torch.arange(inputs.shape[1]).expand(inputs.shape),
    }
    return Samples(fields, num_epochs=_MANY)


class OurRun:
    """This rank's share of the project's training; every rank of the job makes one, and all of them step together.

    `operands`: health of the GEMM operands in the last step that measured them, by their names.
    """

    def __init__(self, config: Config, samples: Samples) -> None:
        self._device = devices.prepare()
        hide_meaningless_warnings(self._device.emulated)
        # They look for CUDA when imported.
        from megatron_fp8.train.setup import build_parts

        if not torch.distributed.is_initialized():
            init_process_group(self._device.collective_backend, config.parallel.distributed_timeout_minutes)
        layout = derive_layout(config, world_size(), None)
        self.parts = build_parts(config, layout, layout.vocab_size, self._device, Recorder([]))
        self.num_parameters = layout.num_parameters
        self.operands: Mapping[str, TensorHealth] = {}
        self._tokens_per_step = layout.tokens_per_global_batch
        self._loader = self.parts.batches.loader(samples, len(samples))
        self._iterators = self._loader.iterators(len(self.parts.chunks))

    def step(self, *, measure: bool = False) -> StepSample:
        """One step as the loop makes it, loss reduction included; `measure`: look at the operands."""
        from megatron_fp8.precision.probe import TensorProbe

        parts = self.parts
        probe = TensorProbe(parts.precision.layers) if measure and parts.precision.policy.fp8 is not None else None
        started = time.perf_counter()
        with probe.measuring() if probe is not None else nullcontext():
            result = parts.stepper.train(parts.optimizer, self._iterators, parts.batches.shape)
        if not result.skipped:
            parts.schedule.step(1)
        loss = result.loss.reduced_mean()
        self._device.synchronize()
        seconds = time.perf_counter() - started
        if probe is not None:
            self.operands = probe.read()
        return StepSample(seconds, self._tokens_per_step, loss, result.skipped)

    def short_step(self) -> StepSample:
        """A whole step."""
        return self.step()

    def peak_memory_bytes(self) -> int:
        """On CPUs the peak of the whole process, on GPUs that of the allocator."""
        return self._device.peak_memory_bytes()

    def close(self) -> None:
        """End the loader's threads."""
        self._loader.close()
