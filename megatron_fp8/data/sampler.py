"""Which samples a data-parallel rank reads in each step.

A dataset is already in the seed's shuffled order, so a global batch is the next `global_batch_size` samples after
those consumed. Only `consumed_samples` and `global_batch_size` decide what a global batch holds; layout and
micro-batch size only divide it. A resume with another data-parallel size or micro-batch size therefore continues with
the very next sample. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


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

        Micro-batch m of all ranks together is the m-th run of micro_batch_size x dp_size samples, as in
        Megatron's pretraining sampler.
        """
        stride = self.micro_batch_size * self.dp_size
        first = consumed_samples + self.dp_rank * self.micro_batch_size
        return tuple(
            range(first + index * stride, first + index * stride + self.micro_batch_size)
            for index in range(self.num_micro_batches)
        )
