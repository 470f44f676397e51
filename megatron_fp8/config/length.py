"""Owns the length of a run in steps, whichever key gives it: the one place where `train_iters` is derived.

Everything after it (rules, schedule, resume, reports) sees `train_iters` alone. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_fp8.config.load import LoadedConfig
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import TrainingConfig
from megatron_fp8.config.start import START, Position

TRAIN_ITERS = "training.train_iters"
# What is wrong with their values may depend on where a run goes on.
LENGTH_KEYS = (TRAIN_ITERS, "training.train_samples", "training.train_epochs")


def samples_needed(training: TrainingConfig, position: Position) -> int:
    """How many samples of its order a run takes from the start to its end, when it goes on at `position`.

    Steps before it may have been of another size.
    """
    return position.consumed_samples + (training.train_iters - position.iteration) * training.global_batch_size


def resolve_length(
    loaded: LoadedConfig, epoch_samples: int | None, position: Position = START
) -> tuple[LoadedConfig, list[Problem]]:
    """The config with `train_iters` from `train_samples` or `train_epochs`, and what contradicts it.

    `epoch_samples`: the samples of `train_epochs` epochs; None: not known (the files have mistakes of their own).
    `position`: where the run goes on; the steps before it may have been of another size. Both keys may be set where
    they say the same, as they do in the config that a run leaves in its directory. A length that cannot be derived
    leaves `train_iters` as it is.
    """
    training = loaded.config.training
    batch = training.global_batch_size
    samples = epoch_samples if training.train_samples is None else training.train_samples
    if training.train_samples is not None:
        key = "training.train_samples"
    elif training.train_epochs is not None:
        key = "training.train_epochs"
    else:
        return loaded, []
    if samples is None:
        return loaded, []
    left = max(samples - position.trained_samples, 0)
    if training.train_samples is not None and left % batch:
        # Steps are whole: a rule says so.
        return loaded, []
    iterations = position.iteration + left // batch
    value = loaded.config.training.train_samples or loaded.config.training.train_epochs
    if iterations == 0:
        reason = f"it is {samples} samples, and a step takes training.global_batch_size={batch}"
        return loaded, [Problem(key, value, reason, "more of them, more text, or a smaller batch")]
    if training.train_iters not in (0, iterations):
        reason = f"{key}={value} says how long the run is, {iterations} steps"
        return loaded, [Problem(TRAIN_ITERS, training.train_iters, reason, f"{TRAIN_ITERS}=0, or {key}=null")]
    config = loaded.config.model_copy(update={"training": training.model_copy(update={"train_iters": iterations})})
    origins = loaded.origins
    if training.train_iters == 0:
        origins = {**origins, TRAIN_ITERS: f"from {key}={value}"}
    return replace(loaded, config=config, origins=origins), []
