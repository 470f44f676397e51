"""Owns what one process of the comparison does: one mode at one seed, from the model's making to its last step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from benchmarks.formats.modes import MODES
from benchmarks.formats.samples import Samples
from benchmarks.formats.work import OperandNoise, RunResult, RunTask
from megatron_fp8.config.load import load_config
from megatron_fp8.config.schema import Config


class Run(Protocol):
    """A model in training."""

    num_parameters: int
    operands: dict[str, OperandNoise]

    def step(self, *, measure: bool) -> tuple[float, bool]:
        """One optimizer step: loss before it, and whether it was skipped."""

    def close(self) -> None:
        """End what was started."""


def run_task(task: RunTask, on_step: Callable[[int], None]) -> RunResult:
    """Train as the task says; `on_step` gets the number of finished steps."""
    started = time.perf_counter()
    torch.set_num_threads(task.num_threads)
    config = load_config(task.config, task.overrides).config
    run = _build(config, Samples.load(task.samples), MODES[task.mode].torchao_recipe)
    losses, skipped = [], []
    num_steps = config.training.train_iters
    try:
        for number in range(num_steps):
            loss, was_skipped = run.step(measure=number == num_steps - 1)
            losses.append(loss)
            if was_skipped:
                skipped.append(number)
            on_step(number + 1)
    finally:
        run.close()
    seconds = time.perf_counter() - started
    return RunResult(task.mode, task.seed, losses, skipped, run.operands, run.num_parameters, seconds)


def _build(config: Config, samples: Samples, torchao_recipe: str | None) -> Run:
    """Only what the mode needs is imported."""
    if torchao_recipe is not None:
        from benchmarks.formats.torchao_run import TorchaoRun

        return TorchaoRun(config, samples, torchao_recipe)
    from benchmarks.formats.our_run import OurRun

    return OurRun(config, samples)
