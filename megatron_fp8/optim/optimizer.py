"""Builds Megatron Core's optimizer and schedule from the config's `optimizer` section, and makes its steps.

Megatron's mixed-precision optimizer keeps FP32 master weights and moments (Transformer Engine's `FusedAdam`), clips by
the global norm, and exempts norms and biases from weight decay. Must not know the model or the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.optim import Optimizer
from transformer_engine.pytorch import Float8Tensor

from megatron_fp8.config.schema import Config
from megatron_fp8.precision.megatron_formats import optimizer_formats
from megatron_fp8.precision.policy import PrecisionPolicy


def build_optimizer(
    config: Config, chunks: Sequence[DistributedDataParallel], policy: PrecisionPolicy, timers: Callable[..., Any]
) -> MegatronOptimizer:
    """AdamW over this rank's model chunks, distributed over the data-parallel ranks if so configured.

    `timers`: Megatron's protocol of timers, as `StepTimes`.
    """
    settings = config.optimizer
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            use_distributed_optimizer=config.parallel.use_distributed_optimizer,
            overlap_param_gather=config.parallel.overlap_param_gather,
            timers=timers,
            barrier_with_L1_time=False,
            **optimizer_formats(policy),
        ),
        list(chunks),
        use_gloo_process_groups=False,
    )
    if "fp8" in (policy.optimizer.exp_avg, policy.optimizer.exp_avg_sq):
        survive_zero_moments(optimizer.optimizer)
    return optimizer


def build_schedule(config: Config, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate by optimizer step: linear warm-up, then the configured decay; constant weight decay."""
    settings = config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=settings.lr_decay_iters or config.training.train_iters,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=settings.lr_wsd_decay_iters,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )


def survive_zero_moments(optimizer: Optimizer) -> None:
    """After every step of `optimizer`, a `FusedAdam`, set FP8 moments that have an infinite scale to 0."""

    def repair(optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:  # noqa: ARG001
        for state in optimizer.state.values():
            for moment in state.values():
                if isinstance(moment, Float8Tensor):
                    _zero_if_unscalable(moment)

    optimizer.register_step_post_hook(repair)


@torch.no_grad()
def _zero_if_unscalable(moment: Float8Tensor) -> None:
    # Without a look at the scale from the host, which would wait for the device.
    scale: Tensor = moment._quantizer.scale
    unscalable = scale.isinf()
    moment._data.masked_fill_(unscalable, 0)
    moment._scale_inv.masked_fill_(unscalable, 1.0)
    scale.masked_fill_(unscalable, 1.0)


@dataclass(frozen=True)
class Update:
    """What became of a step: `grad_norm`, global and before clipping, None where gradients overflowed under the loss
    scale; `made`: whether weights, moments and the step count were changed; `beside`: what was read with the norm."""

    grad_norm: float | None
    made: bool
    beside: tuple[float, ...]


class _LeftOutError(Exception):
    """Ends Megatron's step before it changes anything."""


def update_if(
    optimizer: MegatronOptimizer, beside: Callable[[], Tensor], allowed: Callable[[float, tuple[float, ...]], bool]
) -> Update:
    """Megatron's step, unless the global gradient norm and what is read beside it are not `allowed`.

    `beside`: gives a tensor `[n]` of FP64 on the device that is the same on all ranks, which must all answer alike.
    """
    norm_of = optimizer.get_grad_norm
    norms: list[float] = []
    read: tuple[float, ...] = ()

    def allowed_norm() -> float:
        nonlocal read
        first: float
        device_values = beside()
        # A tensor on the device, as `beside`; Megatron Core 0.16 has read it already.
        norm = torch.as_tensor(norm_of(), dtype=torch.float64, device=device_values.device)
        first, *others = torch.cat([norm.view(1), device_values]).tolist()
        norms.append(first)
        read = tuple(others)
        if not allowed(first, read):
            raise _LeftOutError
        # A number: with a tensor, which it takes too, Megatron would clip where there is nothing to clip.
        return first

    optimizer.get_grad_norm = allowed_norm
    try:
        succeeded, _, _ = optimizer.step()
    except _LeftOutError:
        return Update(norms[-1], made=False, beside=read)
    finally:
        del optimizer.get_grad_norm
    if not succeeded:
        return Update(None, made=False, beside=read or tuple(beside().tolist()))
    if not norms:
        raise RuntimeError(f"{type(optimizer).__name__}.step did not ask for the gradient norm")
    return Update(norms[-1], made=True, beside=read)
