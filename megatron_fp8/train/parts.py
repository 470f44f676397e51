"""Owns the list of what the training loop runs on, this rank's share of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.data.documents import DocumentRules, document_rules
from megatron_fp8.data.loader import BatchLoader, BatchSampler
from megatron_fp8.device import Device
from megatron_fp8.faults.heartbeat import Heartbeat
from megatron_fp8.parallel.groups import ParallelGroups
from megatron_fp8.precision.manager import PrecisionManager
from megatron_fp8.report.record import Recorder
from megatron_fp8.train.checkpointing import Checkpointer
from megatron_fp8.train.health import HealthWatch
from megatron_fp8.train.node_watch import NodeWatch
from megatron_fp8.train.norms import NormWatch
from megatron_fp8.train.profile import StepProfiler
from megatron_fp8.train.replica_check import ReplicaCheck
from megatron_fp8.train.slow_ranks import SlowRankWatch
from megatron_fp8.train.step import BatchShape, Stepper
from megatron_fp8.train.step_times import StepTimes


@dataclass(frozen=True)
class TrainingParts:
    """What the loop runs on, this rank's share of it."""

    config: Config
    layout: Layout
    device: Device
    groups: ParallelGroups
    chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    precision: PrecisionManager
    stepper: Stepper
    health: HealthWatch
    checkpointer: Checkpointer
    times: StepTimes
    slow_ranks: SlowRankWatch
    replicas: ReplicaCheck
    norms: NormWatch
    node: NodeWatch
    profiler: StepProfiler
    recorder: Recorder
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def needs_data(self) -> bool:
        """Whether this rank's stages look at tokens, or at where documents end among them."""
        cuts = self.documents is not None and self.documents.reset_attention_mask
        return self.groups.is_first_stage or self.groups.is_last_stage or cuts

    @cached_property
    def documents(self) -> DocumentRules | None:
        """What happens at the end of a document inside a sample; None: nothing."""
        return document_rules(self.config.data)

    @property
    def reads_data(self) -> bool:
        """Whether this rank reads samples; rank 0 always can, since it builds the indices."""
        return self.groups.rank == 0 or (self.needs_data and self.groups.tp.rank() == 0)

    @property
    def batch_shape(self) -> BatchShape:
        """Sizes of a step on this rank."""
        return BatchShape(
            self.layout.num_microbatches, self.config.model.seq_length, self.config.training.micro_batch_size
        )

    def loader(self, dataset: object, num_samples: int, consumed_samples: int = 0) -> BatchLoader:
        """Micro-batches of `dataset` after `consumed_samples` samples."""
        training = self.config.training
        sampler = BatchSampler(
            training.micro_batch_size,
            training.global_batch_size,
            self.groups.dp.rank(),
            self.groups.dp.size(),
        )
        return BatchLoader(
            dataset if self.reads_data else None,  # type: ignore[arg-type]
            sampler,
            self.config.model.seq_length,
            num_samples,
            self.device.torch_device,
            tp_group=self.groups.tp,
            needs_data=self.needs_data,
            consumed_samples=consumed_samples,
            num_workers=self.config.data.num_workers,
            documents=self.documents,
        )
