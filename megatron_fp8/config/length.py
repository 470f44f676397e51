"""Owns the length of a run in steps, whichever key gives it: the one place where `train_iters` is derived.

Everything after it (rules, schedule, resume, reports) sees `train_iters` alone. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_fp8.config.load import LoadedConfig
from megatron_fp8.config.problem import Problem

TRAIN_ITERS = "training.train_iters"


def resolve_length(loaded: LoadedConfig, epoch_samples: int | None) -> tuple[LoadedConfig, list[Problem]]:
    """The config with `train_iters` from `train_samples` or `train_epochs`, and what contradicts it.

    `epoch_samples`: the samples of `train_epochs` epochs; None: not known (the files have mistakes of their own). Both
    keys may be set where they say the same, as they do in the config that a run leaves in its directory. A length that
    cannot be derived leaves `train_iters` as it is.
    """
    training = loaded.config.training
    batch = training.global_batch_size
    if training.train_samples is not None and training.train_samples % batch == 0:
        key, iterations = "training.train_samples", training.train_samples // batch
    elif training.train_samples is None and training.train_epochs is not None and epoch_samples is not None:
        key, iterations = "training.train_epochs", epoch_samples // batch
    else:
        return loaded, []
    value = loaded.config.training.train_samples or loaded.config.training.train_epochs
    if iterations == 0:
        reason = f"it is {epoch_samples} samples, and a step takes training.global_batch_size={batch}"
        return loaded, [Problem(key, value, reason, "more of them, more text, or a smaller batch")]
    if training.train_iters not in (0, iterations):
        reason = f"{key}={value} says how long the run is, {iterations} steps"
        return loaded, [Problem(TRAIN_ITERS, training.train_iters, reason, f"{TRAIN_ITERS}=0, or {key}=null")]
    config = loaded.config.model_copy(update={"training": training.model_copy(update={"train_iters": iterations})})
    origins = loaded.origins
    if training.train_iters == 0:
        origins = {**origins, TRAIN_ITERS: f"from {key}={value}"}
    return replace(loaded, config=config, origins=origins), []
