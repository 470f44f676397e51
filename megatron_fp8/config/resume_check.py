"""Compares a config with that of the checkpoint a run resumes from: what may differ, and what may not.

Three kinds of keys: those that make it another model or other data order, which are refused; those of the schedule,
which are refused unless the config says that it means them; and those that may change, the interesting ones of which
are mentioned. The end of the decay is part of the schedule also where it follows from the run's length.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from megatron_fp8.config.fields import config_fields
from megatron_fp8.config.layout import shape_of_weights
from megatron_fp8.config.problem import Problem, show_value
from megatron_fp8.config.rules_optimizer import decay_end, decays_from, learning_rate
from megatron_fp8.config.run_start import START, Position
from megatron_fp8.config.schema import Config, ModelConfig, OptimizerConfig, TrainingConfig

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
    "model.hf_model_type",
)
_OF_SCHEDULE = ("optimizer.",)
_OVERRIDE = "checkpoint.override_opt_param_scheduler=true"
_DECAY = "optimizer.lr_decay_iters"
# What the end of the decay follows from; the first that is another one is to blame.
_LENGTHS = ("training.train_samples", "training.train_epochs", "training.global_batch_size", "training.train_iters")
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
    "training.global_batch_size": "samples keep their order, with more or fewer per step",
    **dict.fromkeys(
        ("data.train_data_path", "data.data_path", "data.split"),
        "the data position is a number of samples, whatever they are now",
    ),
}


def compare_with_saved(
    config: Config, saved_text: str, weights_only: bool = False, position: Position = START
) -> tuple[list[Problem], list[str]]:
    """(what forbids to go on from a checkpoint whose config was `saved_text`, in YAML; what a person should know).

    `weights_only`: of the saved run nothing but the weights is taken, so that only they must fit the model.
    `position`: where the run goes on.
    """
    problems, notes = [], []
    differences = list(_differences(config, saved_text))
    if weights_only:
        return _compare_weights(config.model, differences)
    for key, now, before in differences:
        if _is_fixed(key):
            reason = (
                f"the checkpoint was made with {show_value(before)}, which is another model or another sample order"
            )
            problems.append(Problem(key, now, reason, f"{key}={show_value(before)}"))
        elif key == _DECAY:
            # Compared by what it means: naming the step at which the decay ends anyway changes nothing.
            continue
        elif key.startswith(_OF_SCHEDULE) and not config.checkpoint.override_opt_param_scheduler:
            use = f"{key}={show_value(before)}, or {_OVERRIDE}"
            problems.append(Problem(key, now, f"the checkpoint was made with {show_value(before)}", use))
        elif not key.startswith(_SILENT):
            remark = f": {_REMARKS[key]}" if key in _REMARKS else ""
            notes.append(f"{key} is {show_value(now)}, was {show_value(before)}{remark}")
    before = _schedule_before(config, differences)
    problems += _another_decay(config, before, differences, position.iteration)
    notes += _another_rate(config, before, position.iteration)
    return problems, notes


def _compare_weights(model: ModelConfig, differences: list[tuple[str, Any, Any]]) -> tuple[list[Problem], list[str]]:
    """Keys that give parameters other names or shapes are refused; what else makes another model is said."""
    in_model = [(key.removeprefix("model."), now, before) for key, now, before in differences if _is_model(key)]
    saved = model.model_copy(update={name: before for name, _, before in in_model})
    wanted, stored = shape_of_weights(model), shape_of_weights(saved)
    problems, notes = [], []
    for name, now, before in in_model:
        key = f"model.{name}"
        if wanted.get(name) != stored.get(name) or (name == "vocab_size" and None not in (now, before)):
            reason = f"the checkpoint's weights have the names and shapes of {show_value(before)}"
            problems.append(Problem(key, now, reason, f"{key}={show_value(before)}"))
        elif _is_fixed(key):
            notes.append(f"{key} is {show_value(now)}, was {show_value(before)} where the weights come from")
    return problems, notes


def _is_model(key: str) -> bool:
    return key.startswith("model.")


def _schedule_before(config: Config, differences: list[tuple[str, Any, Any]]) -> Config:
    """`config` with the saved values of all that decides about the learning rate."""
    values: dict[str, dict[str, Any]] = {"optimizer": {}, "training": {}}
    for key, _, before in differences:
        section, _, name = key.partition(".")
        if section in values:
            values[section][name] = before
    # Saved values have passed the rules of their time.
    optimizer = OptimizerConfig.model_construct(**{**dict(config.optimizer), **values["optimizer"]})
    training = TrainingConfig.model_construct(**{**dict(config.training), **values["training"]})
    return config.model_copy(update={"optimizer": optimizer, "training": training})


def _another_decay(
    config: Config, before: Config, differences: list[tuple[str, Any, Any]], iteration: int
) -> Iterator[Problem]:
    """That the decay ends at another step, unless nothing until now would have been different: see `decays_from`."""
    end, end_before = decay_end(config), decay_end(before)
    same_style = config.optimizer.lr_decay_style == before.optimizer.lr_decay_style
    # No end: the length is not known, which others say.
    if config.checkpoint.override_opt_param_scheduler or not end or end == end_before or not same_style:
        return
    if iteration <= min(decays_from(config), decays_from(before)):
        return
    changed = [(key, now) for key, now, _ in differences if key in _LENGTHS]
    derived = config.optimizer.lr_decay_iters is None and changed
    key, value = next((each for name in _LENGTHS for each in changed if each[0] == name), ("", None))
    if not derived:
        key, value = _DECAY, config.optimizer.lr_decay_iters
    follows = f"{_DECAY} is null, so " if config.optimizer.lr_decay_iters is None else ""
    old, new = learning_rate(before, iteration), learning_rate(config, iteration)
    rates = f"jump from {old:.4g} to {new:.4g}" if old != new else f"be {old:.4g} as before, but not later"
    yield Problem(
        key,
        value,
        f"{follows}the learning-rate decay would end at step {end}, but at step {end_before} in the checkpoint's "
        f"schedule; at step {iteration} the learning rate would {rates}",
        f"{_DECAY}={end_before}, or {_OVERRIDE}",
    )


def _another_rate(config: Config, before: Config, iteration: int) -> Iterator[str]:
    """The old and the new rate, where another schedule is meant."""
    if not config.checkpoint.override_opt_param_scheduler:
        return
    if decay_end(config) != decay_end(before):
        yield f"the learning-rate decay ends at step {decay_end(config)}, was {decay_end(before)}"
    old, new = learning_rate(before, iteration), learning_rate(config, iteration)
    if old != new:
        yield f"the learning rate at step {iteration} is {new:.4g}, was {old:.4g}"


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
