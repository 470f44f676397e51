"""Evaluates during training: the losses of the validation sets, their total, and the records of them.

Must not know when evaluations happen or how samples are drawn.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from megatron_fp8.data.validation import ValidationSet
from megatron_fp8.monitors.protocol import Event
from megatron_fp8.report.record import Value
from megatron_fp8.train.batches import Batches
from megatron_fp8.train.state import TrainState
from megatron_fp8.train.step import LossSum, Stepper, mean_loss

SERIES = "lm loss validation"
PERPLEXITY = "lm loss validation ppl"


def evaluate(
    stepper: Stepper, batches: Batches, sets: Sequence[ValidationSet], state: TrainState
) -> tuple[float | None, list[Event]]:
    """The total loss over the validation sets in nats per token, and the records of it and of each set's own.

    None without sets, or where none of their tokens counts: then, as for a set without such a token, there is a note
    instead of a number. Collective over all ranks. Training state is left as it was.
    """
    if not sets:
        return None, []
    sums = torch.stack([_loss_of(stepper, batches, validation_set).sum_and_tokens for validation_set in sets])
    torch.distributed.all_reduce(sums)
    losses = [mean_loss(row) for row in sums.tolist()]
    total = total_loss(losses, sums.tolist(), [each.weight for each in sets])
    record: dict[str, Value] = {"iteration": state.iteration, SERIES: total, PERPLEXITY: perplexity(total)}
    for validation_set, loss in zip(sets, losses, strict=True):
        if validation_set.name is not None:
            record[f"{SERIES}/{validation_set.name}"] = loss
            record[f"{PERPLEXITY}/{validation_set.name}"] = perplexity(loss)
    record["consumed-tokens"] = state.consumed_tokens
    return total, [*_sets_without_loss(sets, losses, state.iteration), ("validation", record)]


def total_loss(
    losses: Sequence[float | None], sums_and_tokens: Sequence[Sequence[float]], weights: Sequence[float | None]
) -> float | None:
    """The mean of the sets' losses by their weights, or without weights the mean over all tokens of all sets.

    `weights`: all None, or with the sum 1; a set without a loss has none, in favour of the others, which are the same
    in each evaluation. None where no set has a loss.
    """
    if weights[0] is None:
        return mean_loss([sum(column) for column in zip(*sums_and_tokens, strict=True)])
    weighted = [(loss, weight or 0.0) for loss, weight in zip(losses, weights, strict=True) if loss is not None]
    weight_sum = 1.0 if len(weighted) == len(losses) else sum(weight for _, weight in weighted)
    return sum(loss * weight for loss, weight in weighted) / weight_sum if weight_sum > 0 else None


def perplexity(loss: float | None) -> float | None:
    """exp(loss); infinity where that is no number of FP64, None for no loss."""
    if loss is None:
        return None
    return math.exp(loss) if loss < 700 or math.isnan(loss) else math.inf


def _sets_without_loss(
    sets: Sequence[ValidationSet], losses: Sequence[float | None], iteration: int
) -> Iterator[Event]:
    """At the first evaluation of a run, since what is evaluated stays the same."""
    names = [each.name or "" for each, loss in zip(sets, losses, strict=True) if loss is None]
    if names and iteration == 0:
        yield "no-loss", {"iteration": iteration, "of": "validation", "sets": [name for name in names if name]}


def _loss_of(stepper: Stepper, batches: Batches, validation_set: ValidationSet) -> LossSum:
    num_steps = validation_set.num_samples // batches.config.training.global_batch_size
    with batches.loader(validation_set.dataset, validation_set.num_samples) as loader:
        iterators = loader.iterators(stepper.num_chunks)
        return LossSum.total([stepper.evaluate(iterators, batches.shape) for _ in range(num_steps)])
