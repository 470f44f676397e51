"""Owns the samples that every run of a seed trains on, and the learning rates of its steps.

They are read once, through the datasets of the training loop, and left in a file per seed: so every mode sees the
same tokens in the same order, and torchao's runs need neither Megatron's datasets nor its schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.formats.modes import MODES
from megatron_fp8 import device as devices
from megatron_fp8.config.load import load_config
from megatron_fp8.config.schema import Config
from megatron_fp8.data.loader import FIELDS


@dataclass(frozen=True)
class Samples:
    """A seed's samples, `[num_samples, s]` for each of the loader's fields, and each step's learning rate."""

    fields: Mapping[str, Tensor]
    learning_rates: list[float]

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        return {name: values[index] for name, values in self.fields.items()}

    def __len__(self) -> int:
        return len(self.fields["tokens"])

    @classmethod
    def load(cls, path: Path) -> Samples:
        """Read a file that `prepare` wrote."""
        saved = torch.load(path, weights_only=True)
        return cls(saved["fields"], saved["learning_rates"])


@dataclass(frozen=True)
class Preparation:
    """What is known before the first run: the device in words, and why it cannot run a mode."""

    device: str
    unsupported: Mapping[str, str]


@dataclass(frozen=True)
class PrepareTask:
    """`files`: by seed, the file to write."""

    config: Path
    overrides: tuple[str, ...]
    files: Mapping[int, Path]


def prepare(task: PrepareTask, on_step: Callable[[int], None]) -> Preparation:
    """Write the samples of every seed; `on_step` gets how many are written. Raises what the data layer raises."""
    device = devices.prepare()
    # They look for CUDA when imported.
    from megatron_fp8.data.dataset import build_datasets
    from megatron_fp8.data.tokenizer import Tokenizer

    for number, (seed, path) in enumerate(task.files.items(), start=1):
        config = load_config(task.config, [*task.overrides, f"training.seed={seed}"]).config
        datasets = build_datasets(config, Tokenizer.of(config.data))
        samples = [cast(Any, datasets.train)[index] for index in range(datasets.num_train_samples)]
        fields = {name: torch.stack([sample[name] for sample in samples]) for name in FIELDS}
        torch.save({"fields": fields, "learning_rates": _learning_rates(config)}, path)
        on_step(number)
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
