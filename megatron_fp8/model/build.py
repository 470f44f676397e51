"""Assembles this rank's model chunks: stages, initial weights, Megatron's DDP around each.

Must not know the optimizer or the loop.
"""

from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.model.gpt import GPTStage, StageSpec
from megatron_fp8.model.init import InitSettings, init_parameters
from megatron_fp8.model.layers import LayerFactory
from megatron_fp8.model.megatron_config import ddp_config, transformer_config
from megatron_fp8.parallel.groups import ParallelGroups, wrap_in_ddp
from megatron_fp8.precision.manager import PrecisionManager


def stage_specs(layout: Layout, pp_rank: int) -> list[StageSpec]:
    """The chunks of pipeline rank `pp_rank`: chunk `v` of `V` holds the layers after those of all chunks before it."""
    pp_size, num_chunks = layout.pipeline_model_parallel_size, layout.num_chunks
    num_layers = layout.layers_per_chunk
    return [
        StageSpec(
            first_layer=(chunk * pp_size + pp_rank) * num_layers,
            num_layers=num_layers,
            pre_process=pp_rank == 0 and chunk == 0,
            post_process=pp_rank == pp_size - 1 and chunk == num_chunks - 1,
            vp_stage=chunk if num_chunks > 1 else None,
        )
        for chunk in range(num_chunks)
    ]


def build_model(
    config: Config,
    layout: Layout,
    vocab_size: int,
    groups: ParallelGroups,
    precision: PrecisionManager,
    device: torch.device,
) -> list[DistributedDataParallel]:
    """This rank's model chunks in DDP, with the initial weights in place."""
    stages = build_stages(config, layout, vocab_size, groups, precision, device)
    settings = InitSettings(
        seed=config.training.seed,
        std=config.model.init_method_std,
        num_layers=config.model.num_layers,
        vocab_size=vocab_size,
        activation=config.model.activation,
        zero_centered_norms=config.model.layernorm_zero_centered_gamma,
    )
    chunks = []
    for stage in stages:
        init_parameters(global_parameters([stage]), settings, groups.tp)
        chunks.append(
            wrap_in_ddp(
                stage,
                ddp_config(config, precision.policy),
                # Later chunks communicate while the first computes: one bucket each, as in Megatron.
                disable_bucketing=bool(stage.spec.vp_stage) or config.parallel.overlap_param_gather,
                groups=groups,
            )
        )
    attach_layers(precision, stages)
    return chunks


def build_stages(
    config: Config,
    layout: Layout,
    vocab_size: int,
    groups: ParallelGroups,
    precision: PrecisionManager,
    device: torch.device,
) -> list[GPTStage]:
    """This rank's stages, which share one Megatron config; their weights are yet to be filled."""
    megatron_config = transformer_config(config, layout, precision.policy)
    factory = LayerFactory(
        model=config.model,
        layout=layout,
        tp=groups.tp,
        sequence_parallel=config.parallel.sequence_parallel,
        dtype=precision.params_dtype,
        device=device,
    )
    return [
        GPTStage(spec, config.model, megatron_config, factory, precision, vocab_size, layout.padded_vocab_size)
        for spec in stage_specs(layout, groups.pp.rank())
    ]


def attach_layers(precision: PrecisionManager, stages: Sequence[GPTStage]) -> None:
    """Give the precision manager charge of the stages' layers, whose weights must be in place."""
    precision.attach({stage.spec.first_layer + i: layer for stage in stages for i, layer in enumerate(stage.layers)})


def global_parameters(stages: Sequence[GPTStage | DistributedDataParallel]) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of the stages (in DDP or not) by global name: layers counted over the whole model, from 0."""
    for wrapped in stages:
        stage = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        assert isinstance(stage, GPTStage)
        for name, parameter in stage.named_parameters():
            yield global_name(name, stage.spec.first_layer), parameter


def global_name(name: str, first_layer: int) -> str:
    """The whole model's name for what a stage whose first layer is `first_layer` calls `name`."""
    parts = name.split(".")
    if parts[0] == "layers":
        parts[1] = str(int(parts[1]) + first_layer)
    return ".".join(parts)
