"""The order of passes against Megatron's schedules at work, and the bubble against a simulation of that order."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_fp8.config.layout import Layout, derive_layout
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.pipeline import bubble_share, stage_passes
from tests.ranks import run_on_ranks
from tests.small_run import VOCAB_SIZE, batches, run_small, small_config


def config_of(stages: int, chunks: int, num_microbatches: int) -> Config:
    return small_config(
        model={"num_layers": stages * chunks, "hidden_size": 32, "num_attention_heads": 4},
        parallel={
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        },
        training={"micro_batch_size": 1, "global_batch_size": num_microbatches},
    )


def layout_of(stages: int, chunks: int, num_microbatches: int) -> Layout:
    return derive_layout(config_of(stages, chunks, num_microbatches), stages, VOCAB_SIZE)


def simulated_waiting(layout: Layout) -> list[float]:
    """Share of the time in which each stage waits, when a forward pass takes 1 and a backward pass 2."""
    stages, chunks = layout.pipeline_model_parallel_size, layout.num_chunks
    last = stages * chunks - 1
    todo = [list(stage_passes(layout, stage)) for stage in range(stages)]
    ends: dict[tuple[bool, int, int], float] = {}
    clocks, busy = [0.0] * stages, [0.0] * stages
    while any(todo):
        moved = False
        for stage in range(stages):
            while todo[stage]:
                step = todo[stage][0]
                place = step.chunk * stages + stage
                if step.is_forward:
                    needed = [(True, step.micro_batch, place - 1)] if place else []
                else:
                    needed = [(True, step.micro_batch, place)]
                    needed += [(False, step.micro_batch, place + 1)] if place < last else []
                if not all(key in ends for key in needed):
                    break
                start = max([clocks[stage], *(ends[key] for key in needed)])
                duration = 1.0 if step.is_forward else 2.0
                clocks[stage] = ends[step.is_forward, step.micro_batch, place] = start + duration
                busy[stage] += duration
                todo[stage].pop(0)
                moved = True
        assert moved, "stages wait for each other"
    return [1 - work / max(clocks) for work in busy]


@pytest.mark.parametrize(
    ("stages", "chunks", "num_microbatches"),
    [(1, 1, 4), (2, 1, 1), (2, 1, 8), (4, 1, 8), (4, 1, 2), (2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 2, 8)],
)
def test_the_bubble_is_that_of_a_simulation(stages: int, chunks: int, num_microbatches: int) -> None:
    layout = layout_of(stages, chunks, num_microbatches)
    assert simulated_waiting(layout) == pytest.approx([bubble_share(layout)] * stages)


def test_the_published_bubble() -> None:
    """Narayanan et al. 2021, section 2.2: (p - 1) / (v m), of the time without waiting."""
    share = bubble_share(layout_of(4, 2, 16))
    assert share / (1 - share) == pytest.approx(3 / (2 * 16))


def watch_step(parts: Any) -> list[str]:
    """What Megatron's schedule does in a step: F and a chunk's number, or B."""
    from unittest.mock import patch

    from megatron.core.pipeline_parallel import schedules

    events: list[str] = []
    backward = schedules.backward_step

    def seen(*arguments: Any, **named: Any) -> Any:
        events.append("B")
        return backward(*arguments, **named)

    for number, chunk in enumerate(parts.chunks):
        chunk.module.register_forward_hook(lambda *_, number=number: events.append(f"F{number}"))
    with patch.object(schedules, "backward_step", seen):
        parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
    return events


def observe(config: Config) -> tuple[int, list[str]]:
    record = run_small(config, 0, watch_step)
    return record.coordinates["pp"], record.probe


@pytest.mark.parametrize(("chunks", "num_microbatches"), [(1, 1), (1, 4), (2, 2), (2, 6)])
def test_the_order_is_megatrons(chunks: int, num_microbatches: int) -> None:
    config = config_of(2, chunks, num_microbatches)
    layout = derive_layout(config, 2, VOCAB_SIZE)
    for stage, events in run_on_ranks(2, observe, config):
        planned = [f"F{step.chunk}" if step.is_forward else "B" for step in stage_passes(layout, stage)]
        assert events == planned
