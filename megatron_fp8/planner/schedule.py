"""Owns the order in which a pipeline stage runs its micro-batches, and what it waits for the others. No torch.

Plain 1F1B (Narayanan et al. 2019) and the interleaved schedule (Narayanan et al. 2021, section 2.2), with the warm-up
that Megatron Core gives them: a stage runs ahead by the stages after it, and interleaved by twice those and all of its
chunks but one for a group of micro-batches as large as the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_fp8.config.layout import Layout


@dataclass(frozen=True)
class Pass:
    """One micro-batch's way through one chunk of a stage, forward or backward."""

    is_forward: bool
    micro_batch: int
    chunk: int


def stage_passes(layout: Layout, stage: int, num_microbatches: int | None = None) -> Iterator[Pass]:
    """The passes of `stage` in the order in which it makes them; of fewer micro-batches than a step's if told."""
    pp, chunks = layout.pipeline_model_parallel_size, layout.num_chunks
    count = layout.num_microbatches if num_microbatches is None else num_microbatches
    forward = list(_chunk_order(pp, chunks, count))
    total = len(forward)
    ahead = pp - stage - 1 if chunks == 1 else 2 * (pp - stage - 1) + (chunks - 1) * pp
    ahead = min(ahead, total)
    for index in range(total + ahead):
        if index < total:
            yield Pass(True, *forward[index])
        if index >= ahead:
            micro_batch, chunk = forward[index - ahead]
            yield Pass(False, micro_batch, chunks - 1 - chunk)


def _chunk_order(pp: int, chunks: int, count: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, chunk) of the forward passes: groups of `pp` micro-batches go through all chunks in turn."""
    group = pp if chunks > 1 else 1
    for start in range(0, count, group):
        for chunk in range(chunks):
            for micro_batch in range(start, min(start + group, count)):
                yield micro_batch, chunk


def bubble_share(layout: Layout) -> float:
    """Share of a step's forward and backward time in which a stage waits for others, when all stages take equally long.

    Of `m` micro-batches, `p` stages and `v` chunks a stage: (p - 1) / (v m + p - 1). Narayanan et al. 2021, section
    2.2, give (p - 1) / (v m), of the time without waiting.
    """
    waiting = layout.pipeline_model_parallel_size - 1
    return waiting / (layout.num_chunks * layout.num_microbatches + waiting)
