"""Owns the learning rate of a step as plain arithmetic, for what has to be said before torch is imported.

Training takes it from Megatron Core's `OptimizerParamScheduler`, which a test holds this against. Imports no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_fp8.config.schema import Config, OptimizerConfig


def decay_end(config: Config) -> int | None:
    """The step at which the decay ends, `train_iters` where no key says it; None: the rate does not decay."""
    settings = config.optimizer
    return None if settings.lr_decay_style == "constant" else settings.lr_decay_iters or config.training.train_iters


def decays_from(config: Config) -> int:
    """The first step whose rate depends on `decay_end`, which the schedule must have."""
    settings = config.optimizer
    if settings.lr_decay_style != "WSD":
        return 0
    return (decay_end(config) or 0) - (settings.lr_wsd_decay_iters or 0)


def learning_rate(config: Config, step: int) -> float:
    """Of the step that comes after `step` steps."""
    settings, end = config.optimizer, decay_end(config)
    if step <= settings.lr_warmup_iters and settings.lr_warmup_iters > 0:
        return settings.lr_warmup_init + (settings.lr - settings.lr_warmup_init) * step / settings.lr_warmup_iters
    if end is None:
        return settings.lr
    if step > end:
        return settings.min_lr
    return settings.min_lr + _share(settings, step, end) * (settings.lr - settings.min_lr)


def _share(settings: OptimizerConfig, step: int, end: int) -> float:
    """What is left of the way from the highest rate down to the lowest."""
    style: str = settings.lr_decay_style
    begin = settings.lr_warmup_iters
    if style == "WSD":
        style, begin = settings.lr_wsd_decay_style, end - (settings.lr_wsd_decay_iters or 0)
    if step <= begin:
        return 1.0
    done = (step - begin) / (end - begin)
    return {
        "cosine": 0.5 * (math.cos(math.pi * done) + 1),
        "linear": 1 - done,
        "exponential": 2 * 0.5**done - 1,
        "minus_sqrt": 1 - math.sqrt(done),
    }[style]
