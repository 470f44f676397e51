"""Owns the way from a loaded config to a layout that can be planned, without the text to train on. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_fp8.config.check import DataReport, check_config, fitting_world_sizes
from megatron_fp8.config.layout import Layout, derive_layout
from megatron_fp8.config.length import resolve_length
from megatron_fp8.config.load import LoadedConfig
from megatron_fp8.config.problem import ConfigError, Problem
from megatron_fp8.config.schema import Config
from megatron_fp8.config.warn import config_warnings
from megatron_fp8.planner.gpus import DEFAULT_GPU, GPUS
from megatron_fp8.planner.plan import make_plan
from megatron_fp8.planner.report import plan_text

DataCheck = Callable[[Config], DataReport]


def describe_plan(loaded: LoadedConfig, world_size: int | None, check_data: DataCheck) -> tuple[str, list[Problem]]:
    """The plan as text, on the default GPU, and what is worth a warning. Raises ConfigError with every mistake."""
    loaded, vocab_size = resolve_sizes(loaded, check_data)
    layout = resolve_layout(loaded, world_size, vocab_size)
    return plan_text(make_plan(loaded.config, layout, GPUS[DEFAULT_GPU])), config_warnings(loaded, layout)


def resolve_sizes(loaded: LoadedConfig, check_data: DataCheck) -> tuple[LoadedConfig, int]:
    """The config with its length in steps, where that is known, and the vocabulary's size before padding.

    The tokenizer is read for its size where the config does not give one; missing text to train on is no mistake here.
    Raises ConfigError.
    """
    config = loaded.config
    epoch_samples, vocab_size = None, config.model.vocab_size
    if vocab_size is None or config.training.train_epochs is not None:
        report = check_data(config)
        epoch_samples, vocab_size = report.epoch_samples, vocab_size or report.vocab_size
        problems = [
            replace(problem, use_instead=f"{problem.use_instead}; or model.vocab_size=N")
            for problem in report.problems
            if "tokenizer" in problem.key
        ]
        if vocab_size is None and problems:
            raise ConfigError.from_problems(problems)
    if vocab_size is None:
        raise ConfigError("the size of the vocabulary is unknown; use model.vocab_size=N or data.tokenizer_model=FILE")
    loaded, problems = resolve_length(loaded, epoch_samples)
    if problems:
        raise ConfigError.from_problems(problems)
    return loaded, vocab_size


def resolve_layout(loaded: LoadedConfig, world_size: int | None, vocab_size: int) -> Layout:
    """The layout on `world_size` ranks (None: on the fewest that fit). Raises ConfigError with every mistake."""
    if world_size is None:
        world_size = next(iter(fitting_world_sizes(loaded.config)), None)
    # How long a run is, and what its schedule makes of that, a plan need not know.
    ignored = ("data.",) if loaded.config.training.train_iters else ("data.", "training.train_iters", "optimizer.lr")
    problems = [item for item in check_config(loaded, world_size, vocab_size) if not item.key.startswith(ignored)]
    if problems:
        raise ConfigError.from_problems(problems)
    if world_size is None:
        raise ConfigError("no number of ranks fits the config; pretrain.py CONFIG --check --world-size N says why")
    return derive_layout(loaded.config, world_size, vocab_size)
