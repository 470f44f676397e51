"""Owns what may differ between a config and that of the checkpoint which a run goes on from.

Three kinds of keys: those that make it another model or other data order, which are refused; those of the schedule,
which are refused unless the config says that it means them; and those that may change, the interesting ones of which
are mentioned. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from megatron_fp8.config.fields import config_fields
from megatron_fp8.config.problem import Problem, show_value
from megatron_fp8.config.schema import Config

# Change what is computed from which weights, or which sample comes next.
_FIXED_SECTIONS = ("model",)
_FIXED = ("training.seed",)
_FREE_IN_FIXED_SECTIONS = (
    "model.recompute_granularity",
    "model.recompute_num_layers",
    "model.make_vocab_size_divisible_by",
    "model.hidden_dropout",
    "model.attention_dropout",
    "model.init_method_std",
)
_OF_SCHEDULE = ("optimizer.",)
# Change nothing about the training itself.
_SILENT = (
    "run.",
    "logging.",
    "checkpoint.",
    "faults.",
    "profile.",
    "data.num_workers",
    "data.data_cache_path",
    "training.eval_",
    "training.multiple_validation_sets",
    "training.full_validation",
    # What they say is in training.train_iters.
    "training.train_samples",
    "training.train_epochs",
)
_REMARKS = {
    "training.global_batch_size": "the samples come in the same order, more or fewer of them in a step",
    **dict.fromkeys(
        ("data.train_data_path", "data.data_path", "data.split"),
        "the position in the data is counted in samples, whatever they are now",
    ),
}


def compare_with_saved(config: Config, saved_text: str, weights_only: bool = False) -> tuple[list[Problem], list[str]]:
    """(what forbids to go on from a checkpoint whose config was `saved_text`, in YAML; what a person should know).

    `weights_only`: of the saved run nothing but the weights is taken, so that only the model must be the same.
    """
    problems, notes = [], []
    for key, now, before in _differences(config, saved_text):
        if weights_only and not key.startswith(_FIXED_SECTIONS):
            continue
        if _is_fixed(key):
            reason = (
                f"the checkpoint was made with {show_value(before)}: it is another model, or another order of samples"
            )
            problems.append(Problem(key, now, reason, f"{key}={show_value(before)}"))
        elif key.startswith(_OF_SCHEDULE) and not config.checkpoint.override_opt_param_scheduler:
            use = f"{key}={show_value(before)}, or checkpoint.override_opt_param_scheduler=true"
            problems.append(Problem(key, now, f"the checkpoint was made with {show_value(before)}", use))
        elif not key.startswith(_SILENT):
            remark = f": {_REMARKS[key]}" if key in _REMARKS else ""
            notes.append(f"{key} is {show_value(now)}, was {show_value(before)}{remark}")
    return problems, notes


def _is_fixed(key: str) -> bool:
    in_section = key.partition(".")[0] in _FIXED_SECTIONS and key not in _FREE_IN_FIXED_SECTIONS
    return in_section or key in _FIXED


def _differences(config: Config, saved_text: str) -> Iterator[tuple[str, Any, Any]]:
    """(key, value now, value saved) where they differ; a key that did not exist then had what is its default now."""
    saved = yaml.safe_load(saved_text) or {}
    for key, spec in config_fields().items():
        now = getattr(getattr(config, spec.section), spec.name)
        before = saved.get(spec.section, {}).get(spec.name, spec.default)
        if now != before:
            yield key, now, before
