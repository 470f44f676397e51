"""Owns which of a step's times are a rank's own work, and what is recorded of a rank that is slow at it.

Passes are a rank's own work where tensor parallelism does not put collectives into them; else its attention is, which
has none. Reading is that of the ranks that read. Ranks of the same pipeline stage are compared; each rank has all times
from the record of the interval, so this costs nothing more. Must not know how times are measured.
"""

import socket
from collections.abc import Iterable, Sequence

import torch.distributed
from torch import nn
from transformer_engine.pytorch import DotProductAttention

from megatron_fp8.config.schema import Config
from megatron_fp8.faults.slow_rank import Slowness, SlowRanks, peers
from megatron_fp8.parallel.groups import ParallelGroups
from megatron_fp8.report.record import Recorder
from megatron_fp8.train.step_times import OWN_WORK, StepTimes
from megatron_fp8.train.time_split import RankTimes


class SlowRankWatch:
    """Looks at the times of every interval; does nothing where `faults.slow_rank_factor` is null."""

    def __init__(self, config: Config, groups: ParallelGroups, recorder: Recorder) -> None:
        settings = config.faults
        self._ranks = (
            SlowRanks(settings.slow_rank_factor, settings.slow_rank_intervals)
            if settings.slow_rank_factor is not None and groups.world_size > 1
            else None
        )
        self._tensor_parallel_size = groups.tp.size()
        self._peers = peers(groups.world_size, groups.pp.size())
        self._recorder = recorder

    def add(self, iteration: int, times: Sequence[RankTimes]) -> None:
        """Take an interval's times of all ranks, in their order; collective over all ranks when one is named."""
        if self._ranks is None:
            return
        named: list[Slowness] = []
        for stage in self._peers:
            named += self._ranks.add("compute", {rank: times[rank].own for rank in stage})
            readers = stage[:: self._tensor_parallel_size]
            waits = {rank: times[rank].data for rank in readers}
            named += self._ranks.add("data", waits, {rank: times[rank].whole - times[rank].data for rank in readers})
        if named:
            self._record(iteration, named)

    def _record(self, iteration: int, named: Sequence[Slowness]) -> None:
        hosts: list[str] = [""] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(hosts, socket.gethostname())
        for slow in named:
            self._recorder.write(
                "slow-rank",
                {
                    "iteration": iteration,
                    "rank": slow.rank,
                    "host": hosts[slow.rank],
                    "work": slow.what,
                    "seconds": slow.seconds,
                    "median seconds": slow.median_seconds,
                    "factor": slow.factor,
                },
            )


def mark_own_work(chunks: Iterable[nn.Module], times: StepTimes, tensor_parallel_size: int) -> None:
    """Let modules without collectives say when they work, where whole passes cannot."""
    if tensor_parallel_size == 1:
        return
    span = times(OWN_WORK)
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, DotProductAttention):
                module.register_forward_pre_hook(lambda *_: span.start())
                module.register_forward_hook(lambda *_: span.stop())
