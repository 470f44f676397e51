"""A small model, fixed tokens and a few optimizer steps of the real stepper, on whatever ranks call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_fp8.config.load import load_config  # noqa: F401 - re-exported for tests that read files
from megatron_fp8.config.schema import Config

VOCAB_SIZE = 250
SEQ_LENGTH = 32
GLOBAL_BATCH_SIZE = 16


def small_config(**sections: dict[str, Any]) -> Config:
    """Llama-style, 4 layers, hidden 64; every section's keys can be overridden."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "small"},
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_query_groups": 4,
            "ffn_hidden_size": 128,
            "seq_length": SEQ_LENGTH,
            "vocab_size": VOCAB_SIZE,
        },
        "precision": {"mode": "fp32"},
        "parallel": {},
        "training": {"micro_batch_size": 2, "global_batch_size": GLOBAL_BATCH_SIZE, "train_iters": 10},
        "optimizer": {"lr": 2e-3},
    }
    for name, values in sections.items():
        base.setdefault(name, {}).update(values)
    return Config.model_validate(base)


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step did, the same on every rank."""

    loss: float
    grad_norm: float | None
    validation_loss: float | None


@dataclass(frozen=True)
class RunRecord:
    """Steps of a run, and what the caller's probe saw on this rank."""

    steps: list[StepRecord]
    probe: Any = None
    coordinates: dict[str, int] = field(default_factory=dict)


def run_small(
    config: Config, num_steps: int = 5, probe: Callable[..., Any] | None = None, *, evaluate: bool = False
) -> RunRecord:
    """Train `num_steps` steps in the running world; `probe(parts)` looks at the end.

    `evaluate`: measure the loss after each step on the same batch, which costs a third of the step once more.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from megatron_fp8 import device as devices
    from megatron_fp8.config.layout import derive_layout
    from megatron_fp8.report.record import Recorder
    from megatron_fp8.train.setup import build_parts

    FP8GlobalStateManager.reset()
    initialize_rng_tracker(force_reset=True)
    layout = derive_layout(config, torch.distributed.get_world_size(), VOCAB_SIZE)
    parts = build_parts(config, layout, VOCAB_SIZE, devices.prepare(), Recorder([]))
    try:
        steps = []
        for _ in range(num_steps):
            result = parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
            if not result.skipped:
                parts.schedule.step(1)
            validation = None
            if evaluate:
                validation = parts.stepper.evaluate(batches(parts), parts.batches.shape).reduced_mean()
            steps.append(StepRecord(result.loss.reduced_mean(), result.grad_norm, validation))
        groups = parts.groups
        coordinates = {"tp": groups.tp.rank(), "pp": groups.pp.rank(), "dp": groups.dp.rank()}
        return RunRecord(steps, probe(parts) if probe is not None else None, coordinates)
    finally:
        parallel_state.destroy_model_parallel()


def batches(parts: Any) -> list[Iterator[Any]]:
    """One global batch of fixed random tokens, this rank's share, an iterator per model chunk."""
    import torch

    from megatron_fp8.data.documents import cumulative_lengths
    from megatron_fp8.data.loader import BatchSampler, MicroBatch

    seq_length = parts.config.model.seq_length
    generator = torch.Generator().manual_seed(0)
    size = parts.config.training.global_batch_size
    device = parts.device.torch_device
    tokens = torch.randint(0, VOCAB_SIZE, (size, seq_length + 1), generator=generator).to(device)
    # Some tokens do not count, unequally many in each sample.
    mask = (torch.rand(size, seq_length, generator=generator) > 0.2).float().to(device)
    sampler = BatchSampler(parts.config.training.micro_batch_size, size, parts.groups.dp.rank(), parts.groups.dp.size())

    def iterate() -> Iterator[MicroBatch]:
        for indices in sampler.micro_batches(0):
            rows = tokens[list(indices)]
            positions = torch.arange(seq_length, device=device).expand(len(indices), -1)
            inputs = rows[:, :-1].contiguous()
            # Each sample is a document of its own: no token ends one.
            apart = cumulative_lengths(inputs, VOCAB_SIZE) if parts.config.data.reset_attention_mask else None
            yield MicroBatch(inputs, rows[:, 1:].contiguous(), mask[list(indices)], positions, apart)

    return [iterate() for _ in parts.chunks]
