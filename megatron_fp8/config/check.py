"""Validates a whole config: every error between its values, at once, before anything starts.

The rules lie in the `rules_*` files, one theme each. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_fp8.config.environment import check_determinism, check_environment
from megatron_fp8.config.facts import WORLD_SIZE, Facts, Finding, divisors, to_problem
from megatron_fp8.config.load import LoadedConfig
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.rules_data import check_data_keys, check_length
from megatron_fp8.config.rules_model import check_model
from megatron_fp8.config.rules_model_form import check_model_form
from megatron_fp8.config.rules_optimizer import check_optimizer
from megatron_fp8.config.rules_parallel import check_parallel, check_sizes
from megatron_fp8.config.rules_precision import check_precision
from megatron_fp8.config.rules_run import check_faults, check_hang, check_logging, check_profile
from megatron_fp8.config.run_start import START, Position
from megatron_fp8.config.schema import Config


@dataclass(frozen=True)
class DataReport:
    """What a look at a config's files found: the tokenizer's size (None: unknown) and every mistake.

    `epoch_samples`: samples of `training.train_epochs` epochs; None: not asked for, or unknown. `notes`: what a person
    who asked for a check should know.
    """

    vocab_size: int | None
    problems: tuple[Problem, ...]
    epoch_samples: int | None = None
    notes: tuple[str, ...] = ()


def all_findings(facts: Facts) -> Iterator[Finding]:
    """Every mistake by every rule."""
    yield from check_model(facts)
    yield from check_model_form(facts)
    yield from check_parallel(facts)
    yield from check_sizes(facts)
    yield from check_precision(facts)
    yield from check_optimizer(facts)
    yield from check_data_keys(facts)
    yield from check_length(facts)
    yield from check_logging(facts)
    yield from check_hang(facts)
    yield from check_faults(facts)
    yield from check_profile(facts)
    yield from check_environment(facts)
    yield from check_determinism(facts)


def check_config(
    loaded: LoadedConfig, world_size: int | None, vocab_size: int | None, position: Position = START
) -> list[Problem]:
    """Every mistake of a config on `world_size` ranks with a tokenizer of `vocab_size` tokens.

    None: not known; what depends on it is left unchecked. `position`: where the run goes on. Files are not opened.
    """
    facts = Facts(loaded.config, world_size, vocab_size, position)
    origins = {**loaded.origins, WORLD_SIZE: "the number of processes"}
    return [to_problem(finding, facts, all_findings, origins) for finding in all_findings(facts)]


def fitting_world_sizes(config: Config) -> list[int]:
    """The world sizes on which parallel and batch sizes come out even, in ascending order."""
    facts = Facts(config, None, None)
    num_samples = config.training.global_batch_size // config.training.micro_batch_size
    sizes = [facts.model_parallel_size * copies for copies in divisors(num_samples, 0)]
    return sorted(size for size in sizes if not list(check_parallel(replace(facts, world_size=size))))
