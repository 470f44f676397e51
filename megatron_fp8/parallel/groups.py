"""Makes Megatron Core's process groups, and what follows from them: coordinates, amax group, seeds, DDP.

From here on groups are passed as arguments; nothing else reads Megatron's global state.
"""

from dataclasses import dataclass

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import MegatronModule
from torch.distributed import ProcessGroup

from megatron_fp8.config.schema import ParallelConfig


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's process groups.

    `tp`, `pp`: tensor- and pipeline-parallel group. `dp`: data-parallel group, context-parallel ranks included.
    `tp_dp`: all ranks of this pipeline stage.
    """

    tp: ProcessGroup
    pp: ProcessGroup
    dp: ProcessGroup
    tp_dp: ProcessGroup
    rank: int
    world_size: int

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the first pipeline stage."""
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage."""
        return self.pp.rank() == self.pp.size() - 1

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss counts: one rank per data-parallel replica."""
        return self.is_last_stage and self.tp.rank() == 0


def build_groups(config: ParallelConfig) -> ParallelGroups:
    """Make Megatron Core's groups over all ranks, in its order tp-cp-ep-dp-pp."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        distributed_timeout_minutes=config.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    return ParallelGroups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        tp_dp=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
    )


def amax_group(config_value: str, groups: ParallelGroups) -> ProcessGroup | None:
    """The ranks whose amaxes are reduced (maximum); None: no reduction.

    `auto`: the data-parallel group, extended by the tensor-parallel ranks of the same stage when there are any.
    Tensor-parallel ranks exchange FP8 bytes, so they must share their scales; stages exchange BF16, so the group
    never spans stages.
    """
    if config_value == "off":
        return None
    if config_value == "data_parallel":
        return groups.dp
    if config_value == "tensor_and_data_parallel" or groups.tp.size() > 1:
        return groups.tp_dp
    return groups.dp


def seed_ranks(seed: int, groups: ParallelGroups) -> None:
    """Seed dropout: tensor-parallel ranks share the masks of what they share, every other pair of ranks differs.

    Weights do not depend on this (see `model/init.py`).
    """
    torch.manual_seed(seed)
    rank_seed = seed + 1_000 * groups.pp.rank() + 1_000_000 * groups.dp.rank()
    tensor_parallel.model_parallel_cuda_manual_seed(rank_seed)


def wrap_in_ddp(
    module: MegatronModule, config: DistributedDataParallelConfig, disable_bucketing: bool, groups: ParallelGroups
) -> DistributedDataParallel:
    """Megatron's DDP around a model chunk.

    The one place where Megatron Core 0.19 (Python 3.12 and up) and 0.16 differ: 0.19 takes the layout of the
    distributed optimizer's buffers and warns without it; 0.16 has no such argument.
    """
    arguments = {}
    if config.use_distributed_optimizer and hasattr(DistributedOptimizer, "compute_full_param_layout"):
        # As DDP chooses: one bucket without overlap, or where communication is off the critical path.
        one_bucket = disable_bucketing or not config.overlap_grad_reduce or groups.pp.rank() > 0
        arguments["full_param_layout"] = DistributedOptimizer.compute_full_param_layout(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            None if one_bucket else config.bucket_size or max(40_000_000, 1_000_000 * groups.dp.size()),
            groups.dp.size(),
            config,
        )
    return DistributedDataParallel(module.config, config, module, disable_bucketing=disable_bucketing, **arguments)
