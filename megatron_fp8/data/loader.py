"""Chooses the samples of each data-parallel rank, and loads its micro-batches onto the device.

A dataset is already in the seed's shuffled order, so a global batch is the next `global_batch_size` samples after
those consumed. Layout and micro-batch size only divide it: a resume under others continues with the very next sample.

Rank 0 of a tensor-parallel group reads; the others receive its share of the global batch in one broadcast of packed
int64. Ranks in the middle of the pipeline neither read nor receive.

Threads prefetch, not worker processes: a sample is a slice of a memory-mapped file, so there is too little Python work
for a process, which costs seconds of start-up, another import of everything, and a second copy of every byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_fp8.data.documents import DocumentRules, cumulative_lengths, document_positions

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
PREFETCHED_GLOBAL_BATCHES = 2


@dataclass(frozen=True)
class BatchSampler:
    """One data-parallel rank's share of each global batch. Raises ValueError for sizes that are not divisible."""

    micro_batch_size: int
    """Samples of this rank in one forward/backward pass."""
    global_batch_size: int
    """Samples of all ranks in one step."""
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(f"dp_rank {self.dp_rank} must be from 0 to dp_size - 1 = {self.dp_size - 1}")
        if min(self.micro_batch_size, self.global_batch_size) < 1:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} and global_batch_size {self.global_batch_size} "
                f"must be at least 1"
            )
        if self.global_batch_size % (self.micro_batch_size * self.dp_size):
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not divisible by micro_batch_size "
                f"{self.micro_batch_size} x dp_size {self.dp_size}"
            )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of this rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def micro_batches(self, consumed_samples: int) -> tuple[range, ...]:
        """Sample indices of this rank's micro-batches in the step after `consumed_samples` samples.

        Micro-batch m of all ranks is the m-th run of micro_batch_size x dp_size samples, as in Megatron's sampler.
        """
        stride = self.micro_batch_size * self.dp_size
        first = consumed_samples + self.dp_rank * self.micro_batch_size
        return tuple(
            range(first + index * stride, first + index * stride + self.micro_batch_size)
            for index in range(self.num_micro_batches)
        )


class SampleSource(Protocol):
    """A dataset: samples are `[s]` tensors `tokens`, `labels`, `loss_mask` (0 or 1), `position_ids`."""

    def __getitem__(self, index: int) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on the device, tensors `[b, s]`; `[b, 0]` on ranks that need no data."""

    tokens: Tensor
    """int64."""
    labels: Tensor
    """int64; the token that follows each of `tokens`."""
    loss_mask: Tensor
    """float32; 0 where a token does not count."""
    position_ids: Tensor
    """int64."""
    cu_seqlens: Tensor | None = None
    """int32 `[n + 1]`, `documents.cumulative_lengths` of `tokens`; None: attention crosses documents."""


class BatchLoader:
    """Micro-batches of one rank, after `consumed_samples`; a context manager that ends its threads.

    `dataset`: None on ranks that do not read. `num_samples`: end of the samples; iterators end before a global batch
    that would pass it. `tp_group`: the tensor-parallel group, None for one rank. `needs_data`: False on ranks in the
    middle of the pipeline. `num_workers`: threads that prefetch; 0: read on demand. `documents`: what happens at the
    end of a document; None: nothing. All ranks of a tensor-parallel group must draw the same number of steps.
    """

    def __init__(
        self,
        dataset: SampleSource | None,
        sampler: BatchSampler,
        seq_length: int,
        num_samples: int,
        device: torch.device,
        tp_group: ProcessGroup | None = None,
        needs_data: bool = True,
        consumed_samples: int = 0,
        num_workers: int = 1,
        documents: DocumentRules | None = None,
    ) -> None:
        self._is_reader = needs_data and (tp_group is None or tp_group.rank() == 0)
        if self._is_reader and dataset is None:
            raise ValueError("this rank reads for its tensor-parallel group but has no dataset")
        self._dataset = dataset
        self._sampler = sampler
        self._seq_length = seq_length
        self._num_samples = num_samples
        self._device = device
        self._tp_group = tp_group
        self._needs_data = needs_data
        # The end-of-document id after which positions restart, and that after which attention does.
        self._reset_positions_after = documents.eod_id if documents and documents.reset_position_ids else None
        self._reset_attention_after = documents.eod_id if documents and documents.reset_attention_mask else None
        self._start = consumed_samples
        self._drawn_steps = 0
        self._queues: list[deque[MicroBatch]] = []
        self._taken: list[int] = []
        self._prefetched: deque[Future[tuple[Tensor, list[Tensor]]]] = deque()
        self._next_sample = consumed_samples
        self._pool: ThreadPoolExecutor | None = None
        if num_workers > 0 and self._is_reader:
            self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="prefetch")
        self._prefetch()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and drop prefetched batches."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._prefetched.clear()

    @property
    def consumed_samples(self) -> int:
        """Where a resume continues: after the steps whose micro-batches every model chunk has taken.

        Prefetched batches do not count.
        """
        steps = min(self._taken, default=0) // self._sampler.num_micro_batches
        return self._start + steps * self._sampler.global_batch_size

    def iterators(self, num_chunks: int = 1) -> list[Iterator[MicroBatch]]:
        """One iterator per model chunk of this rank (interleaved pipelines have several), for the whole run.

        Each gives the same micro-batches, which are read once. May be called once. Errors of reading are raised by the
        iterators, with the reading thread's traceback.
        """
        if self._queues:
            raise RuntimeError("iterators() may be called only once")
        self._queues = [deque() for _ in range(num_chunks)]
        self._taken = [0] * num_chunks
        return [self._iterate(chunk) for chunk in range(num_chunks)]

    def _iterate(self, chunk: int) -> Iterator[MicroBatch]:
        queue = self._queues[chunk]
        while True:
            if not queue and not self._draw_step():
                return
            # Counted before it is yielded: whoever holds the last micro-batch has taken the step.
            self._taken[chunk] += 1
            yield queue.popleft()

    def _draw_step(self) -> bool:
        """Put the next step's micro-batches into every chunk's queue; False at the end of the samples."""
        step_start = self._start + self._drawn_steps * self._sampler.global_batch_size
        if step_start + self._sampler.global_batch_size > self._num_samples:
            return False
        micro_batches = self._receive(step_start) if self._needs_data else self._absent()
        self._drawn_steps += 1
        for queue in self._queues:
            queue.extend(micro_batches)
        return True

    def _receive(self, step_start: int) -> list[MicroBatch]:
        num_micro_batches, micro_batch_size = self._sampler.num_micro_batches, self._sampler.micro_batch_size
        if self._is_reader:
            host_packed, read_lengths = self._next_read(step_start)
            packed = host_packed.to(self._device, non_blocking=True)
        else:
            read_lengths = []
            shape = (len(FIELDS), num_micro_batches, micro_batch_size, self._seq_length)
            packed = torch.empty(shape, dtype=torch.int64, device=self._device)
        if self._tp_group is not None and self._tp_group.size() > 1:
            torch.distributed.broadcast(packed, group=self._tp_group, group_src=0)
        tokens, labels, loss_mask, position_ids = packed
        lengths: Sequence[Tensor | None] = [None] * num_micro_batches
        if self._reset_attention_after is not None:
            # The number of documents is a shape, which the host needs: ranks that do not read wait for the broadcast,
            # once a step.
            lengths = self._to_device(read_lengths if self._is_reader else self._document_lengths(tokens.cpu()))
        fields = zip(tokens, labels, loss_mask.float(), position_ids, lengths, strict=True)
        return [MicroBatch(*of_micro_batch) for of_micro_batch in fields]

    def _document_lengths(self, tokens: Tensor) -> list[Tensor]:
        """`cu_seqlens` of the micro-batches in `tokens` `[micro-batches, b, s]`; empty where attention is not reset."""
        if self._reset_attention_after is None:
            return []
        return [cumulative_lengths(samples, self._reset_attention_after) for samples in tokens]

    def _to_device(self, lengths: list[Tensor]) -> Sequence[Tensor]:
        """The same on the device, by one asynchronous copy."""
        joined = torch.cat(lengths).pin_memory()
        return joined.to(self._device, non_blocking=True).split_with_sizes([len(each) for each in lengths])

    def _absent(self) -> list[MicroBatch]:
        """Micro-batches without tokens: reading them by mistake fails on their shape."""
        ids = torch.empty(self._sampler.micro_batch_size, 0, dtype=torch.int64, device=self._device)
        return [MicroBatch(ids, ids, ids.float(), ids)] * self._sampler.num_micro_batches

    def _next_read(self, step_start: int) -> tuple[Tensor, list[Tensor]]:
        if self._pool is None:
            return self._read_step(step_start)
        step = self._prefetched.popleft().result()
        self._prefetch()
        return step

    def _prefetch(self) -> None:
        if self._pool is None:
            return
        size = self._sampler.global_batch_size
        while len(self._prefetched) < PREFETCHED_GLOBAL_BATCHES and self._next_sample + size <= self._num_samples:
            self._prefetched.append(self._pool.submit(self._read_step, self._next_sample))
            self._next_sample += size

    def _read_step(self, step_start: int) -> tuple[Tensor, list[Tensor]]:
        """This rank's share of a global batch, int64 [fields, micro-batches, b, s], and its `_document_lengths`."""
        assert self._dataset is not None
        shares = self._sampler.micro_batches(step_start)
        shape = (len(FIELDS), len(shares), self._sampler.micro_batch_size, self._seq_length)
        packed = torch.empty(shape, dtype=torch.int64, pin_memory=True)
        for number, indices in enumerate(shares):
            for row, index in enumerate(indices):
                sample = self._dataset[index]
                for field, name in enumerate(FIELDS):
                    packed[field, number, row] = sample[name]
        tokens = packed[FIELDS.index("tokens")]
        if self._reset_positions_after is not None:
            packed[FIELDS.index("position_ids")] = document_positions(tokens, self._reset_positions_after)
        return packed, self._document_lengths(tokens)
