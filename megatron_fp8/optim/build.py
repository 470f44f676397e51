"""Owns the translation of the config's `optimizer` section into Megatron Core's optimizer and schedule.

Megatron's mixed-precision optimizer keeps FP32 masters and moments (Transformer Engine's `FusedAdam`), clips by the
global norm, and leaves norms and biases out of the weight decay. Must not know the model or the loop.
"""

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_fp8.config.schema import Config
from megatron_fp8.optim.fp8_moments import survive_zero_moments
from megatron_fp8.precision.megatron_formats import optimizer_formats
from megatron_fp8.precision.policy import PrecisionPolicy


def build_optimizer(
    config: Config, chunks: Sequence[DistributedDataParallel], policy: PrecisionPolicy
) -> MegatronOptimizer:
    """AdamW over this rank's model chunks, distributed over the data-parallel ranks if so configured.

    Under a loss scale, Megatron's schedules scale the loss from here on.
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
            **optimizer_formats(policy),
        ),
        list(chunks),
        use_gloo_process_groups=False,
    )
    if "fp8" in (policy.optimizer.exp_avg, policy.optimizer.exp_avg_sq):
        survive_zero_moments(optimizer.optimizer)
    if policy.loss_scaling is not None:
        for chunk in chunks:
            chunk.config.grad_scale_func = optimizer.scale_loss
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
