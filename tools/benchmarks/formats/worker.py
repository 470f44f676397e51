"""What the processes of a comparison do: one reads the samples, each of the others trains one mode at one seed.

Samples are read once, through the datasets of the training loop, and left in a file per seed: so every mode sees the
same tokens in the same order, and torchao's runs need neither Megatron's datasets nor its schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol, cast

import torch
from torch import nn

from benchmarks.formats.comparison import Failure, OperandNoise, RunResult, RunTask
from benchmarks.formats.plan import MODES, Preparation, PrepareTask
from benchmarks.runs import OurRun, Samples, StepSample
from megatron_fp8 import device as devices
from megatron_fp8.config.load import load_config
from megatron_fp8.config.schema import Config
from megatron_fp8.data.loader import FIELDS
from megatron_fp8.errors import BadInputError
from megatron_fp8.precision.tensor_health import TensorHealth

# Names of linear layers in this project and in the plain model, and the short ones of the comparison.
_LINEARS = {
    "self_attention.layernorm_qkv": "qkv",
    "self_attention.proj": "proj",
    "layernorm_mlp.fc1": "fc1",
    "layernorm_mlp.fc2": "fc2",
    "gate_up": "fc1",
    "down": "fc2",
}


class MeasuredRun(Protocol):
    """A model in training."""

    num_parameters: int
    operands: Mapping[str, TensorHealth]

    def step(self, *, measure: bool) -> StepSample:
        """One optimizer step; `measure`: look at the operands."""

    def close(self) -> None:
        """End what was started."""


def prepare(task: PrepareTask) -> Preparation:
    """Write the samples of every seed. Raises what the data layer raises."""
    device = devices.prepare()
    # They look for CUDA when imported.
    from megatron_fp8.data.dataset import build_datasets
    from megatron_fp8.data.tokenizer import Tokenizer

    for seed, path in task.files.items():
        config = load_config(task.config, [*task.overrides, f"training.seed={seed}"]).config
        datasets = build_datasets(config, Tokenizer.of(config.data))
        samples = [cast(Any, datasets.train)[index] for index in range(datasets.num_train_samples)]
        fields = {name: torch.stack([sample[name] for sample in samples]) for name in FIELDS}
        Samples(fields, _learning_rates(config)).save(path)
    return Preparation(device.description, _unsupported_modes())


def _learning_rates(config: Config) -> list[float]:
    """The learning rate of each step, by the schedule of the training loop."""
    from megatron_fp8.optim.optimizer import build_schedule

    # The schedule only writes into an optimizer's parameter groups.
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.optimizer.lr)
    schedule = build_schedule(config, optimizer)
    rates = []
    for _ in range(config.training.train_iters):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        schedule.step(1)
    return rates


def _unsupported_modes() -> dict[str, str]:
    """Why this machine's device cannot run a mode."""
    from megatron_fp8.precision.te_recipe import why_unsupported

    # torchao's GEMMs need of a device what tensorwise scaling needs.
    recipes = {name: mode.fp8_recipe or (mode.torchao_recipe and "tensorwise") for name, mode in MODES.items()}
    reasons = {name: why_unsupported(recipe) for name, recipe in recipes.items() if recipe is not None}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def send_preparation(connection: Connection, task: PrepareTask) -> None:
    """Prepare, and send the result, or a Failure for a person's mistake."""
    try:
        connection.send(prepare(task))
    except BadInputError as error:
        connection.send(Failure(str(error)))


def send_run(connection: Connection, task: RunTask) -> None:
    """Train, and send the number of finished steps after each, then the result, or a Failure for a person's mistake."""
    try:
        connection.send(run_task(task, connection.send))
    except BadInputError as error:
        connection.send(Failure(str(error)))


def run_task(task: RunTask, on_step: Callable[[int], None]) -> RunResult:
    """Train as the task says; `on_step` gets the number of finished steps."""
    started = time.perf_counter()
    torch.set_num_threads(task.num_threads)
    config = load_config(task.config, task.overrides).config
    run = _build(config, Samples.load(task.samples), MODES[task.mode].torchao_recipe)
    losses: list[float] = []
    skipped = []
    num_steps = config.training.train_iters
    try:
        for number in range(num_steps):
            sample = run.step(measure=number == num_steps - 1)
            losses.append(cast(float, sample.loss))
            if sample.skipped:
                skipped.append(number)
            on_step(number + 1)
    finally:
        run.close()
    operands = {
        _short_name(name): OperandNoise(health.sqnr_db, health.clipped, health.flushed)
        for name, health in run.operands.items()
    }
    seconds = time.perf_counter() - started
    return RunResult(task.mode, task.seed, losses, skipped, operands, run.num_parameters, seconds)


def _build(config: Config, samples: Samples, torchao_recipe: str | None) -> MeasuredRun:
    """Only what the mode needs is imported."""
    if torchao_recipe is not None:
        from benchmarks.formats.torchao_run import TorchaoRun

        return TorchaoRun(config, samples, torchao_recipe)
    return OurRun(config, samples)


def _short_name(name: str) -> str:
    """`layers.0/self_attention.layernorm_qkv/input` -> `layers.0/qkv/input`."""
    layer, linear, kind = name.split("/")
    return f"{layer}/{_LINEARS.get(linear, linear)}/{kind}"
