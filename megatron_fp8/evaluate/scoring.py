"""Scores continuations by their log-probability under a loaded model, in batches of similar length.

Works on any layout: data-parallel ranks share the batches, and every rank gets all results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed
from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_fp8.config.layout import round_up
from megatron_fp8.config.rules_precision_shapes import fp8_token_multiple
from megatron_fp8.generate.loaded_model import LoadedModel
from megatron_fp8.parallel.object_collectives import all_gather

# Fewer lengths need fewer kernels. Padding comes after all tokens, which attend only to earlier ones.
_LENGTH_MULTIPLE = 16


@dataclass(frozen=True)
class Request:
    """Tokens of which the last `num_scored` are scored; at least one comes before these."""

    tokens: Sequence[int]
    num_scored: int


@dataclass(frozen=True)
class Score:
    """Sum of the scored tokens' log-probabilities in nats; whether each was the most likely one."""

    log_probability: float
    is_greedy: bool


@dataclass(frozen=True)
class _MicroBatch:
    """`tokens`, `labels`, `mask` `[b, s]`; `mask` is true where a label is scored."""

    tokens: Tensor
    labels: Tensor
    mask: Tensor


class Scorer:
    """Scores requests of at most `model.num_positions` tokens before the last one."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        (self._stage,) = model.stages
        precision, training = model.config.precision, model.config.training
        self._rows = training.micro_batch_size
        self._num_micro_batches = model.layout.num_microbatches
        self._multiple = fp8_token_multiple(precision.fp8_recipe) if precision.mode == "fp8" else 1

    def score(self, requests: Sequence[Request], on_done: Callable[[int], None] | None = None) -> list[Score]:
        """The score of each request, on every rank; collective. `on_done` is called with the number of done ones."""
        longest = self._model.num_positions + 1
        wrong = [r for r in requests if not 0 <= r.num_scored < len(r.tokens) <= longest]
        if wrong:
            raise ValueError(f"{len(wrong)} requests have no token before the scored ones, or more than {longest}")
        # Longest first: running out of memory shows at once.
        order = sorted(range(len(requests)), key=lambda index: (-len(requests[index].tokens), index))
        dp = self._model.groups.dp
        step = self._rows * self._num_micro_batches * dp.size()
        found: list[tuple[int, float, bool]] = []
        for first in range(0, len(order), step):
            chosen = order[first : first + step]
            mine = chosen[dp.rank() :: dp.size()]
            length = self._length(len(requests[chosen[0]].tokens) - 1)
            results = self._run([requests[index] for index in mine], length)
            found += [(index, *result) for index, result in zip(mine, results, strict=False)]
            if on_done is not None:
                on_done(first + len(chosen))
        scores = {index: Score(total, greedy) for share in all_gather(found) for index, total, greedy in share}
        return [scores[index] for index in range(len(requests))]

    def _length(self, longest: int) -> int:
        """The length that the samples of a pass are padded to."""
        multiple = _LENGTH_MULTIPLE
        while self._rows * multiple % self._multiple:
            multiple += _LENGTH_MULTIPLE
        return min(round_up(longest, multiple), self._model.num_positions)

    def _run(self, requests: Sequence[Request], length: int) -> list[tuple[float, bool]]:
        """(sum of log-probabilities, greedy) of each request on ranks that report the loss; elsewhere nothing."""
        model = self._model
        batches = list(self._micro_batches(requests, length))
        with model.precision.evaluation():
            reports = get_forward_backward_func()(
                forward_step_func=partial(_forward_step, model.groups.tp),
                data_iterator=iter(batches),
                model=self._stage,
                num_microbatches=len(batches),
                seq_length=length,
                micro_batch_size=self._rows,
                forward_only=True,
                collect_non_loss_data=True,
            )
        if not model.groups.reports_loss:
            return []
        totals = torch.cat([total for total, _ in reports]).tolist()
        greedy = torch.cat([greedy for _, greedy in reports]).tolist()
        return list(zip(totals, greedy, strict=True))[: len(requests)]

    def _micro_batches(self, requests: Sequence[Request], length: int) -> Iterator[_MicroBatch]:
        """The requests in the micro-batches of a pass; rows without a request score nothing."""
        shape = (self._num_micro_batches * self._rows, length)
        tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.bool)
        for row, request in enumerate(requests):
            text = torch.tensor(request.tokens)
            end = len(text) - 1
            tokens[row, :end] = text[:-1]
            labels[row, :end] = text[1:]
            mask[row, end - request.num_scored : end] = True
        device = self._model.device.torch_device
        for rows in zip(*(torch.split(part, self._rows) for part in (tokens, labels, mask)), strict=True):
            yield _MicroBatch(*(part.to(device) for part in rows))


def _forward_step(
    tp: ProcessGroup, iterator: Iterator[_MicroBatch], model: nn.Module
) -> tuple[Tensor, partial[tuple[Tensor, Tensor]]]:
    """Called by Megatron's schedule for each micro-batch: the stage's output, and what reads scores from it."""
    batch = next(iterator)
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    return model(batch.tokens, positions), partial(_read_off, tp, batch)


def _read_off(tp: ProcessGroup, batch: _MicroBatch, logits: Tensor, non_loss_data: bool) -> tuple[Tensor, Tensor]:
    """(sums of log-probabilities, FP64 `[b]`; greedy, `[b]`) from `logits` `[s, b, padded_vocab / tp]`."""
    assert non_loss_data
    labels = batch.labels.transpose(0, 1).contiguous()
    is_greedy = (_most_likely(logits, tp) == labels).transpose(0, 1)
    # Works in place on the logits.
    losses = tensor_parallel.vocab_parallel_cross_entropy(logits, labels).transpose(0, 1)
    total = -torch.where(batch.mask, losses.double(), 0.0).sum(dim=1)
    return total, (is_greedy | ~batch.mask).all(dim=1)


def _most_likely(logits: Tensor, tp: ProcessGroup) -> Tensor:
    """The most likely token at each position, `[s, b]`, over all ranks' parts of the vocabulary."""
    best, token = logits.max(dim=-1)
    token = token + tp.rank() * logits.shape[-1]
    if tp.size() == 1:
        return token
    bests, tokens = ([torch.empty_like(part) for _ in range(tp.size())] for part in (best, token))
    torch.distributed.all_gather(bests, best.contiguous(), group=tp)
    torch.distributed.all_gather(tokens, token.contiguous(), group=tp)
    rank = torch.stack(bests).argmax(dim=0, keepdim=True)
    return torch.stack(tokens).gather(0, rank).squeeze(0)
