"""Owns what differs between the versions of Megatron Core that run this: 0.19.2, and 0.16.1 where Python is older.

Nothing else asks which of them it is. Must not know configs or models.
"""

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import MegatronModule

from megatron_fp8.parallel.groups import ParallelGroups


def in_ddp(
    module: MegatronModule, config: DistributedDataParallelConfig, disable_bucketing: bool, groups: ParallelGroups
) -> DistributedDataParallel:
    """Megatron's DDP around a model chunk.

    0.19 wants to be told where the distributed optimizer's buffers put each parameter, and warns where it has to find
    that out by itself; 0.16 takes nothing else.
    """
    arguments = {}
    if config.use_distributed_optimizer and hasattr(DistributedOptimizer, "compute_full_param_layout"):
        # The size that DDP chooses: one bucket where nothing overlaps, or where communication is off the critical path.
        one_bucket = disable_bucketing or not config.overlap_grad_reduce or groups.pp.rank() > 0
        arguments["full_param_layout"] = DistributedOptimizer.compute_full_param_layout(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            None if one_bucket else config.bucket_size or max(40_000_000, 1_000_000 * groups.dp.size()),
            groups.dp.size(),
            config,
        )
    return DistributedDataParallel(module.config, config, module, disable_bucketing=disable_bucketing, **arguments)
