"""One training step and one evaluation pass over Megatron's schedules.

Must not know where batches come from, what is written, or how long training lasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron_fp8.optim.optimizer import update_if
from megatron_fp8.parallel.groups import ParallelGroups
from megatron_fp8.precision.manager import PrecisionManager
from megatron_fp8.train.step_times import DATA, OPTIMIZER, SCALES, StepTimes


class MicroBatch(Protocol):
    """What a step reads; every tensor is `[b, s]`, `loss_mask` 0 where a token does not count.

    `cu_seqlens`, int32 `[n + 1]`: where the documents begin and end that attention keeps apart; None: it keeps none.
    """

    @property
    def tokens(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def loss_mask(self) -> Tensor: ...
    @property
    def position_ids(self) -> Tensor: ...
    @property
    def cu_seqlens(self) -> Tensor | None: ...


@dataclass(frozen=True)
class BatchShape:
    """Sizes of one step on this rank: micro-batches, tokens per sample, samples per micro-batch."""

    num_microbatches: int
    seq_length: int
    micro_batch_size: int


@dataclass(frozen=True)
class LossSum:
    """Sum of per-token losses in nats and the number of tokens that counted, as FP64 `[2]` on the device.

    Zero on ranks that do not report the loss (see `ParallelGroups.reports_loss`), so that a sum over all ranks
    counts every token once.
    """

    sum_and_tokens: Tensor

    @classmethod
    def total(cls, parts: Sequence[LossSum]) -> LossSum:
        """The sum of several, of which there must be one at least."""
        return cls(torch.stack([part.sum_and_tokens for part in parts]).sum(dim=0))

    def reduced_mean(self) -> float:
        """Mean loss per token over all ranks, in nats; a collective over the whole world. NaN without tokens."""
        total = self.sum_and_tokens.clone()
        torch.distributed.all_reduce(total)
        loss_sum, num_tokens = total.tolist()
        return loss_sum / num_tokens if num_tokens > 0 else float("nan")


class GlobalLoss:
    """The loss sum of a step over all ranks, on its way: the device adds it up while nobody waits.

    Collective over the whole world when made.
    """

    def __init__(self, loss: LossSum) -> None:
        self._total = loss.sum_and_tokens.clone()
        self._reduction = torch.distributed.all_reduce(self._total, async_op=True)

    def sum_and_tokens(self) -> Tensor:
        """FP64 `[2]` on the device, as in `LossSum`."""
        if self._reduction is not None:
            self._reduction.wait()
        return self._total


def mean_loss(sum_and_tokens: Sequence[float]) -> float | None:
    """In nats per token; None without tokens, unless even the masked ones have spoilt the sum: 0 times NaN is NaN."""
    loss_sum, num_tokens = sum_and_tokens
    if num_tokens > 0:
        return loss_sum / num_tokens
    return None if loss_sum == 0 else math.nan


@dataclass(frozen=True)
class MeanLoss:
    """Of the steps since the last record, over all ranks: `mean` in nats per token, None where no token counted, and
    whether there was a step that was not skipped."""

    mean: float | None
    any_step: bool


class IntervalLoss:
    """Sum of the losses of the steps since the last `take`, skipped ones left out; added up step by step."""

    def __init__(self, device: torch.device) -> None:
        # Sum in nats, tokens, steps.
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, loss: LossSum) -> None:
        """Count a step that was not skipped."""
        self._sums[:2] += loss.sum_and_tokens
        self._sums[2] += 1

    def take(self) -> MeanLoss:
        """What there is since the last call; collective over all ranks."""
        # Of a resumed interval one rank knows all earlier steps: whether there were any is asked of all ranks.
        total = self._sums.clone()
        torch.distributed.all_reduce(total)
        self._sums.zero_()
        *sum_and_tokens, num_steps = total.tolist()
        return MeanLoss(mean_loss(sum_and_tokens), num_steps > 0)

    def state(self) -> Tensor:
        """This rank's sums, FP64 `[3]`; the ranks' sums belong together."""
        return self._sums.clone()

    def restore(self, sums: Tensor) -> None:
        """Put back a `state`."""
        self._sums.copy_(sums)


@dataclass(frozen=True)
class StepResult:
    """What a step did; all but `loss`, this rank's loss sum, is the same on every rank.

    `mean_loss`: over all ranks, in nats per token; None where no token counted. `grad_norm`: global L2 norm before
    clipping; None, as no number says what it was, when gradients overflowed under the loss scale. `skipped`: for that,
    or because loss or gradients were not finite, the weights and moments are as they were.
    """

    loss: LossSum
    mean_loss: float | None
    grad_norm: float | None
    skipped: bool

    @property
    def nonfinite(self) -> bool:
        """Whether NaN or infinity in loss or gradients was the reason, and not the loss scale."""
        return self.skipped and self.grad_norm is not None


class Stepper:
    """Runs steps of one model, optimizer and precision manager; evaluation does without Megatron's DDP."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel] | Sequence[nn.Module],
        groups: ParallelGroups,
        precision: PrecisionManager,
        device: torch.device,
        times: StepTimes,
    ) -> None:
        self._chunks = list(chunks)
        self._groups = groups
        self._precision = precision
        self._device = device
        self._times = times
        self._run_schedule = get_forward_backward_func()

    @property
    def num_chunks(self) -> int:
        """Model chunks of this rank; each takes an iterator of its own."""
        return len(self._chunks)

    def train(
        self,
        optimizer: MegatronOptimizer,
        iterators: Sequence[Iterator[MicroBatch]],
        shape: BatchShape,
        before_update: Callable[[], None] | None = None,
    ) -> StepResult:
        """One optimizer step over one global batch; `iterators` has one iterator per model chunk.

        `before_update`: called when the gradients are whole, before the optimizer changes them.
        """
        with self._times.step():
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
                # Megatron's schedules would do this for configs that say FP8 in its own terms only.
                chunk.module.is_first_microbatch = True
            optimizer.zero_grad()
            with self._precision.training_step():
                loss = self._forward_backward(iterators, shape, forward_only=False)
            if before_update is not None:
                before_update()
            with self._times(OPTIMIZER):
                return self._update(optimizer, loss)

    def _update(self, optimizer: MegatronOptimizer, loss: LossSum) -> StepResult:
        """New weights and FP8 scales; neither, on all ranks, where the loss or a gradient of any is not finite.

        The gradients of tokens that do not count are 0 whatever their loss is, so the loss is asked too.
        """
        everywhere = GlobalLoss(loss)
        update = update_if(
            optimizer,
            everywhere.sum_and_tokens,
            lambda norm, total: math.isfinite(norm) and math.isfinite(mean_loss(total) or 0.0),
        )
        with self._times(SCALES):
            self._precision.finish_step(skipped=not update.made)
        return StepResult(loss, mean_loss(update.beside), update.grad_norm, skipped=not update.made)

    def evaluate(self, iterators: Sequence[Iterator[MicroBatch]], shape: BatchShape) -> LossSum:
        """Loss over one global batch; training state, FP8 histories included, is left as it was."""
        trains = [chunk.training for chunk in self._chunks]
        for chunk in self._chunks:
            chunk.eval()
        try:
            with self._precision.evaluation():
                return self._forward_backward(iterators, shape, forward_only=True)
        finally:
            for chunk, trained in zip(self._chunks, trains, strict=True):
                chunk.train(trained)

    def _forward_backward(
        self, iterators: Sequence[Iterator[MicroBatch]], shape: BatchShape, forward_only: bool
    ) -> LossSum:
        several = len(self._chunks) > 1
        reports = self._run_schedule(
            forward_step_func=self._forward_step,
            data_iterator=list(iterators) if several else iterators[0],
            model=self._chunks if several else self._chunks[0],
            num_microbatches=shape.num_microbatches,
            seq_length=shape.seq_length,
            micro_batch_size=shape.micro_batch_size,
            forward_only=forward_only,
        )
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        if self._groups.reports_loss:
            for report in reports:
                total += report
        return LossSum(total)

    def _forward_step(
        self, iterator: Iterator[MicroBatch], model: DistributedDataParallel
    ) -> tuple[Tensor, partial[tuple[Tensor, Tensor, Tensor]]]:
        """What Megatron's schedules call for each micro-batch: the stage's output and the loss of it."""
        with self._times(DATA):
            batch = next(iterator)
        output = model(batch.tokens, batch.position_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens)
        return output, partial(_loss, batch.loss_mask)


def _loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the losses `[b, s]` that count, number of tokens that count, and both for the log (FP64 `[2]`).

    The log's sum is one of FP64 from the start, so that it does not depend on how tokens lie in micro-batches.
    """
    mask = loss_mask.to(losses.dtype)
    loss_sum = (losses * mask).sum()
    num_tokens = mask.sum()
    report = torch.stack([(losses.detach().double() * mask).sum(), num_tokens.double()])
    return loss_sum, num_tokens.to(torch.int), report
