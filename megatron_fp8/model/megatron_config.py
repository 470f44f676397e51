"""Translates the config into Megatron Core's `TransformerConfig` and DDP config. Nothing else writes to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_fp8.config.layout import GATED_ACTIVATIONS, Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.precision.megatron_formats import gradient_formats, model_formats
from megatron_fp8.precision.policy import PrecisionPolicy


def _keep(weight: Tensor) -> Tensor:
    """Initialization left to `model/init.py`."""
    return weight


def transformer_config(config: Config, layout: Layout, policy: PrecisionPolicy) -> TransformerConfig:
    """What Megatron Core's schedules, DDP, embedding and gradient finalization read."""
    model, parallel = config.model, config.parallel
    interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=layout.num_query_groups,
        kv_channels=layout.kv_channels,
        ffn_hidden_size=layout.ffn_hidden_size,
        gated_linear_unit=model.activation in GATED_ACTIVATIONS,
        add_bias_linear=model.add_bias_linear,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        # Gradients of norms that every tensor-parallel rank applies to its own heads are added up over these ranks.
        qk_layernorm=model.qk_layernorm in ("per_head", "per_head_after_rope"),
        init_method=_keep,
        output_layer_init_method=_keep,
        **model_formats(policy),
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        # Sums of losses and token counts are reduced, and divided once: no layout changes the objective.
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        # Between two stages the interleaved schedule has two messages in flight; in one batch they get mixed up.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        gradient_accumulation_fusion=False,
        # Megatron's embedding then indexes its table, whose backward pass adds in a fixed order.
        deterministic_mode=config.training.deterministic_mode,
    )


def ddp_config(config: Config, policy: PrecisionPolicy) -> DistributedDataParallelConfig:
    """Gradients are reduced as sums, since the division by the token count comes last."""
    parallel = config.parallel
    return DistributedDataParallelConfig(
        **gradient_formats(policy),
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        average_in_collective=False,
    )


def connect_training(
    config: Config,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    timers: Callable[..., Any],
    gradient_span: AbstractContextManager[None],
) -> None:
    """Complete the `TransformerConfig` that all chunks share with what Megatron's schedules call during training.

    It exists before the chunks and the optimizer do. `timers`: Megatron's protocol of timers; `gradient_span`: entered
    around all that is done with gradients at the end of a schedule.
    """

    def finalize(*arguments: Any, **keywords: Any) -> None:
        with gradient_span:
            finalize_model_grads(*arguments, **keywords)

    shared = chunks[0].config
    shared.timers = timers
    shared.barrier_with_L1_time = False
    shared.finalize_model_grads_func = finalize
    if config.parallel.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        shared.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    if config.precision.mode == "fp16":
        shared.grad_scale_func = optimizer.scale_loss
