"""Owns the work that every subject does: the same tokens in the same order, and what one step reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_fp8.config.schema import Config

_SEED = 20261129


@dataclass(frozen=True)
class StepSample:
    """One measured step of one process. `loss`: nats per token before the step; None where there is none."""

    seconds: float
    num_tokens: int
    loss: float | None


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


def fixed_tokens(config: Config) -> Tensor:
    """One global batch of random tokens, int64 `[global_batch, s + 1]`; every step trains on it again."""
    generator = torch.Generator().manual_seed(_SEED)
    size = (config.training.global_batch_size, config.model.seq_length + 1)
    assert config.model.vocab_size is not None
    return torch.randint(0, config.model.vocab_size, size, generator=generator)
