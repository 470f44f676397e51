"""Our side: small models trained on real ranks and saved, logits of checkpoints, the tool as a person calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_fp8.commands.convert import main
from megatron_fp8.config.schema import Config
from tests.command_line import exit_code
from tests.small_run import batches


def convert(*arguments: object) -> None:
    """`megatron-fp8 convert ARGUMENTS`, in this process; it has to succeed."""
    assert exit_code(main, *arguments) == 0


def train_and_save(config: Config, directory: Path) -> None:
    """Two steps in the running world, then a checkpoint in `directory`."""
    from megatron.core import parallel_state

    from megatron_fp8.train.checkpointing import Progress
    from megatron_fp8.train.state import TrainState
    from megatron_fp8.train.step import IntervalLoss

    parts = make_parts(config, directory)
    state = TrainState()
    for _ in range(2):
        parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
        parts.schedule.step(1)
        state = state.after_step(config.training.global_batch_size, config.model.seq_length)
    progress = Progress(state, IntervalLoss(parts.device.torch_device), None)
    parts.checkpointer.after_step(progress, stops=True)
    parallel_state.destroy_model_parallel()


def logits_of(directories: list[Path], tokens: list[Any]) -> list[Any]:
    """FP32 logits `[b, s, vocab]` of the checkpoints in directories, for `tokens` int64 `[b, s]`; on one rank."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    from megatron_fp8.checkpoint.directory import CheckpointDirectory
    from megatron_fp8.train.step import IntervalLoss

    found = []
    for directory, inputs in zip(directories, tokens, strict=True):
        checkpoints = CheckpointDirectory(directory)
        iteration = checkpoints.latest()
        saved = yaml.safe_load(checkpoints.manifest(iteration).config)
        saved.update(parallel={}, precision={"mode": "fp32"})
        saved["model"].update(hidden_dropout=0.0, attention_dropout=0.0)
        initialize_rng_tracker(force_reset=True)
        parts = make_parts(Config.model_validate(saved), None)
        parts.checkpointer.load(checkpoints.path(iteration), IntervalLoss(parts.device.torch_device), weights_only=True)
        device = parts.device.torch_device
        positions = torch.arange(inputs.shape[1], device=device).expand(inputs.shape)
        with torch.no_grad():
            logits = parts.chunks[0].module(inputs.to(device), positions)
        assert logits.dtype == torch.float32
        found.append(logits[..., : parts.batches.layout.vocab_size].transpose(0, 1).cpu())
        parallel_state.destroy_model_parallel()
    return found


def make_parts(config: Config, directory: Path | None) -> Any:
    """What trains `config` in the running world, saving into `directory`."""
    import torch

    from megatron_fp8 import device as devices
    from megatron_fp8.config.layout import derive_layout
    from megatron_fp8.report.record import Recorder
    from megatron_fp8.train.setup import build_parts

    layout = derive_layout(config, torch.distributed.get_world_size(), None)
    return build_parts(config, layout, layout.vocab_size, devices.prepare(), Recorder([]), directory)
