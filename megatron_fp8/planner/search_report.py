"""Owns the result of a search as a person reads it, and as plain data. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.text import Text

from megatron_fp8.config.schema import Config
from megatron_fp8.planner.report import MEMORY_LABELS, table
from megatron_fp8.planner.search import Proposal, SearchResult
from megatron_fp8.planner.units import in_bytes, in_percent

_MOST_REASONS = 5


def search_tables(result: SearchResult, most: int) -> Group:
    """The `most` fastest layouts; where none fits, why."""
    head = (
        f"{result.world_size} x {result.gpu.title}: {result.num_candidates:,} layouts looked at, "
        f"{result.num_valid:,} valid, {len(result.fitting):,} fit into {in_bytes(result.usable_bytes)}"
    )
    if not result.fitting:
        return Group(Text(head, style="bold"), *(Text(line) for line in why_none(result)))
    columns = ("TP x PP x DP", "chunks", "micro-batch", "SP", "optimizer", "recompute", "memory", "bubble", "step")
    made = table("fastest first, by an estimate of the step's time", "", *columns, "tokens/s/GPU")
    for number, proposal in enumerate(result.fitting[:most], 1):
        made.add_row(str(number), *_cells(proposal))
    return Group(Text(head, style="bold"), made, Text("The estimate ranks layouts; it is no forecast."))


def override_lines(result: SearchResult, config: Config, most: int) -> Iterator[str]:
    """What to type for each layout of the table; to be written as it is, however wide."""
    if result.fitting:
        yield f"To plan or run one of them: --world-size {result.world_size} and"
    for number, proposal in enumerate(result.fitting[:most], 1):
        yield f"{number}: {proposal.overrides(config)}"


def why_none(result: SearchResult) -> Iterator[str]:
    """Why no layout fits."""
    smallest = result.smallest
    if smallest is None:
        yield "No layout passes the rules. What stood in the way, and of how many layouts:"
        for reason, count in list(result.refused.items())[:_MOST_REASONS]:
            yield f"  {count:,}: {reason}"
        return
    fullest = smallest.fullest
    kind, size = max(fullest.by_kind.items(), key=lambda item: item[1])
    yield (
        f"No layout fits. The smallest takes {in_bytes(fullest.total)} on stage {fullest.stage}, "
        f"{in_bytes(fullest.total - result.usable_bytes)} too much; "
        f"most of it is {MEMORY_LABELS[kind]}, {in_bytes(size)}:"
    )
    yield "  " + ", ".join(f"{key.partition('.')[2]} {value}" for key, value in smallest.values.items())
    yield "Use more GPUs, GPUs with more memory, or a smaller model or sequence."


def search_json(result: SearchResult, config: Config, most: int) -> dict[str, Any]:
    """Plain data: bytes, seconds, tokens per second of all ranks."""
    return {
        "world_size": result.world_size,
        "gpu": result.gpu.name,
        "usable_bytes": result.usable_bytes,
        "num_candidates": result.num_candidates,
        "num_valid": result.num_valid,
        "num_fitting": len(result.fitting),
        "why_none": [] if result.fitting else list(why_none(result)),
        "layouts": [
            {
                "values": dict(item.values),
                "overrides": item.overrides(config),
                "memory_bytes": item.fullest.total,
                "step_seconds": None if item.seconds is None else item.seconds.total,
                "tokens_per_second": item.tokens_per_second,
            }
            for item in result.fitting[:most]
        ],
    }


def _cells(proposal: Proposal) -> Iterator[str]:
    layout, values, seconds = proposal.layout, list(proposal.values.values()), proposal.seconds
    _, _, _, sequence, distributed, micro, recompute, layers = values
    assert seconds is not None
    assert proposal.tokens_per_second is not None
    yield (f"{layout.tensor_model_parallel_size} x {layout.pipeline_model_parallel_size} x {layout.data_parallel_size}")
    yield str(layout.num_chunks)
    yield str(micro)
    yield "yes" if sequence else "no"
    yield "distributed" if distributed else "replicated"
    yield (
        "none"
        if recompute == "none"
        else ("all layers" if layers is None else f"{layers} of {layout.layers_per_chunk}")
    )
    yield in_bytes(proposal.fullest.total)
    yield in_percent(seconds.waiting / seconds.total)
    yield f"{seconds.total:,.3f} s"
    yield f"{proposal.tokens_per_second / layout.world_size:,.0f}"
