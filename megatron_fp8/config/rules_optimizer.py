"""Rules for learning rates and the lengths of the schedule's parts. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_fp8.config.facts import Alternative, Facts, Finding

LR = "optimizer.lr"
MIN_LR = "optimizer.min_lr"
WARMUP_INIT = "optimizer.lr_warmup_init"
WARMUP = "optimizer.lr_warmup_iters"
DECAY = "optimizer.lr_decay_iters"
WSD_DECAY = "optimizer.lr_wsd_decay_iters"


def check_optimizer(facts: Facts) -> Iterator[Finding]:
    """Every mistake of the learning rates and of the schedule's lengths."""
    optimizer = facts.config.optimizer
    for rule, key in (("lowest rate", MIN_LR), ("first rate", WARMUP_INIT)):
        if facts.get(key) > optimizer.lr:
            yield Finding(
                rule,
                key,
                f"must not exceed the peak learning rate {LR}={optimizer.lr:g}",
                (
                    Alternative(key, [float(f"{optimizer.lr / 10:.1g}")]),
                    Alternative(LR, [max(optimizer.min_lr, optimizer.lr_warmup_init)]),
                ),
            )
    decay = optimizer.lr_decay_iters or facts.config.training.train_iters
    if decay == 0:
        # Not known: another rule asks for the length, or the files that decide it have mistakes.
        return
    decay_key = DECAY if optimizer.lr_decay_iters else "training.train_iters"
    longer = Alternative(decay_key, [optimizer.lr_warmup_iters + (optimizer.lr_wsd_decay_iters or 0) + 1])
    if optimizer.lr_warmup_iters >= decay:
        yield Finding(
            "warm-up",
            WARMUP,
            f"warmup must end before the decay does, at step {decay} ({decay_key})",
            (Alternative(WARMUP, [decay // 10, 0], most=1), longer),
        )
    yield from _wsd(facts, decay, longer)


def _wsd(facts: Facts, decay: int, longer: Alternative) -> Iterator[Finding]:
    optimizer = facts.config.optimizer
    if optimizer.lr_decay_style != "WSD":
        return
    room = decay - optimizer.lr_warmup_iters
    if optimizer.lr_wsd_decay_iters is None:
        yield Finding(
            "WSD length",
            WSD_DECAY,
            "required: the length of the decay phase of optimizer.lr_decay_style=WSD",
            (Alternative(WSD_DECAY, [max(room // 5, 1)]),),
        )
    elif room > 0 and optimizer.lr_wsd_decay_iters > room:
        yield Finding(
            "WSD phases",
            WSD_DECAY,
            f"warmup ({WARMUP}={optimizer.lr_warmup_iters}) and decay phase together exceed the schedule's {decay} "
            "steps, so the learning rate would jump",
            (Alternative(WSD_DECAY, [room]), longer),
        )


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
    factors: dict[str, float] = {
        "cosine": 0.5 * (math.cos(math.pi * done) + 1),
        "linear": 1 - done,
        "exponential": 2 * 0.5**done - 1,
        "minus_sqrt": 1 - math.sqrt(done),
    }
    return factors[style]
