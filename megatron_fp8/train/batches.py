"""Makes the loaders of a run: this rank's share of the samples, and the sizes of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.data.documents import DocumentRules, document_rules
from megatron_fp8.data.loader import BatchLoader, BatchSampler, SampleSource
from megatron_fp8.parallel.groups import ParallelGroups
from megatron_fp8.train.step import BatchShape


@dataclass(frozen=True)
class Batches:
    """What of the data this rank reads, and in which sizes."""

    config: Config
    layout: Layout
    groups: ParallelGroups
    device: torch.device

    @cached_property
    def shape(self) -> BatchShape:
        """Sizes of a step on this rank."""
        training = self.config.training
        return BatchShape(self.layout.num_microbatches, self.config.model.seq_length, training.micro_batch_size)

    @property
    def needs_data(self) -> bool:
        """Whether this rank's stages read tokens, or where documents end among them."""
        documents = self.documents is not None and self.documents.reset_attention_mask
        return self.groups.is_first_stage or self.groups.is_last_stage or documents

    @property
    def reads_data(self) -> bool:
        """Whether this rank reads samples; rank 0 always can, since it builds the indices."""
        return self.groups.rank == 0 or (self.needs_data and self.groups.tp.rank() == 0)

    @cached_property
    def documents(self) -> DocumentRules | None:
        """What happens at the end of a document inside a sample; None: nothing."""
        return document_rules(self.config.data)

    def loader(self, dataset: SampleSource | None, num_samples: int, consumed_samples: int = 0) -> BatchLoader:
        """Micro-batches of `dataset` after `consumed_samples` samples; None on ranks that do not read."""
        training = self.config.training
        sampler = BatchSampler(
            training.micro_batch_size, training.global_batch_size, self.groups.dp.rank(), self.groups.dp.size()
        )
        return BatchLoader(
            dataset if self.reads_data else None,
            sampler,
            self.config.model.seq_length,
            num_samples,
            self.device,
            tp_group=self.groups.tp,
            needs_data=self.needs_data,
            consumed_samples=consumed_samples,
            num_workers=self.config.data.num_workers,
            documents=self.documents,
        )
