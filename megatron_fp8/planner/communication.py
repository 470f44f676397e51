"""Owns the bytes that the collectives of one step move, per rank of a stage. Imports no torch.

What is sent for a token, a layer, a parameter is the precision chart's matter (`precision/chart/collectives.py`, held
against real messages); here is how often, and what the chart leaves to no token: gradients of what tensor-parallel
ranks hold whole, and of the tied embedding's two copies. Single numbers (losses, norms) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_fp8.config.layout import Layout, position_parameters
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.activations import run_formats, without_fp8
from megatron_fp8.planner.memory import PER_TENSOR
from megatron_fp8.planner.parameters import RankParameters, rank_parameters
from megatron_fp8.planner.stages import Chunk, stage_chunks
from megatron_fp8.precision.chart.collectives import collective_rows
from megatron_fp8.precision.chart.rows import ELEMENT_BYTES, ChartRow, Formats


@dataclass(frozen=True)
class Traffic:
    """One kind of message of a step. `group`: TP, PP, DP, TP x DP (amaxes) or ends (the tied embedding's stages).

    `num_ranks`: of the group. `tensor_bytes`: of the whole tensors that the step moves. `sent_bytes`: what each rank
    sends, by a ring: 2 (n - 1) / n of an all-reduced tensor, (n - 1) / n of a gathered or scattered one, all of a sent
    one. `waits`: nothing computes meanwhile.
    """

    name: str
    group: str
    format: str
    num_ranks: int
    tensor_bytes: float
    sent_bytes: float
    waits: bool


def step_traffic(config: Config, layout: Layout, stage: int) -> list[Traffic]:
    """The messages of a rank of `stage`, largest first."""
    found: dict[tuple[str, str], float] = {}
    for name, format_name, size in _sizes(config, layout, stage):
        found[name, format_name] = found.get((name, format_name), 0.0) + size
    traffic = [_traffic(config, layout, name, format_name, size) for (name, format_name), size in found.items() if size]
    return sorted(traffic, key=lambda item: -item.sent_bytes)


def _traffic(config: Config, layout: Layout, name: str, format_name: str, size: float) -> Traffic:
    parallel = config.parallel
    tp, dp = layout.tensor_model_parallel_size, layout.data_parallel_size
    group, num_ranks = name.split()[0], {"TP": tp, "DP": dp}.get(name.split()[0], 2)
    if group == "amax":
        group, num_ranks = "TP x DP", tp * dp
    elif group == "tied":
        group = "ends"
    share = 1.0 if group == "PP" else (num_ranks - 1) / num_ranks * (2 if "all-reduce" in name else 1)
    hidden = group == "DP" and (parallel.overlap_param_gather if "all-gather" in name else parallel.overlap_grad_reduce)
    return Traffic(name, group, format_name, num_ranks, size, share * size, waits=not hidden)


def _sizes(config: Config, layout: Layout, stage: int) -> Iterator[tuple[str, str, float]]:
    """(name, format, bytes of whole tensors in a step) of each row of the chart and what it leaves out."""
    formats = run_formats(config)
    chunks = stage_chunks(config, layout, stage)
    parameters = rank_parameters(config, layout, chunks)
    in_fp8 = sum(chunk.num_fp8_layers for chunk in chunks), sum(chunk.recomputed_fp8_layers for chunk in chunks)
    others = sum(chunk.num_other_layers for chunk in chunks), sum(chunk.recomputed_other_layers for chunk in chunks)
    # A layer in FP8 gathers other bytes than one outside; what belongs to no layer is in both charts alike.
    for layers_formats, (num_layers, again) in ((formats, in_fp8), (without_fp8(formats), others)):
        for row in collective_rows(config, layout, layers_formats):
            count = _of_layers(row, layout, num_layers, again)
            if count:
                yield row.tensor, row.format, row.size * count
    for row in collective_rows(config, layout, formats):
        yield row.tensor, row.format, row.size * _of_the_rest(row, layout, chunks, parameters)
    yield from _beside_the_chart(config, layout, formats, chunks, parameters)


def _of_layers(row: ChartRow, layout: Layout, num_layers: int, again: int) -> float:
    """How many of what the row is given per, if that is a layer; a second forward pass sends all once more."""
    passes = num_layers + (again if "forward" in row.tensor else 0)
    if row.per == "token and layer":
        return passes * layout.tokens_per_microbatch * layout.num_microbatches
    if row.per == "layer and micro-batch":
        return (num_layers + again / 2) * layout.num_microbatches
    return num_layers if row.per == "layer and step" else 0


def _of_the_rest(row: ChartRow, layout: Layout, chunks: tuple[Chunk, ...], parameters: RankParameters) -> float:
    """How many of what the row is given per, if that is no layer."""
    tokens = layout.tokens_per_microbatch * layout.num_microbatches
    first = sum(chunk.has_embedding for chunk in chunks)
    last = sum(chunk.has_head for chunk in chunks)
    if row.per == "token":
        return tokens * (first if "embedding" in row.tensor else last)
    if row.per == "token and stage":
        # Outputs of all chunks but the model's last, gradients of the inputs of all but its first.
        return tokens * (2 * len(chunks) - first - last)
    if row.per == "parameter":
        if row.tensor == "DP all-gather of FP8 layers' weights":
            return parameters.fp8_gemm_weights
        return parameters.others if "other parameters" in row.tensor else parameters.total
    return 0


def _beside_the_chart(
    config: Config, layout: Layout, formats: Formats, chunks: tuple[Chunk, ...], parameters: RankParameters
) -> Iterator[tuple[str, str, float]]:
    grads = formats.policy.optimizer.main_grads
    size = ELEMENT_BYTES[grads]
    if config.parallel.sequence_parallel and layout.tensor_model_parallel_size > 1:
        # Position embeddings see whole sequences on every rank.
        positions = sum(chunk.has_embedding for chunk in chunks) * position_parameters(config.model)
        yield "TP all-reduce of norms' gradients", grads, float((parameters.whole - positions) * size)
    fp8 = formats.fp8()
    if fp8 is not None and fp8.param_gather and fp8.recipe in PER_TENSOR and layout.data_parallel_size > 1:
        # One number for each of a layer's weights, when the masters are cast.
        num_weights = len(layout.gemms) * sum(chunk.num_fp8_layers for chunk in chunks)
        yield "DP all-reduce of FP8 weights' amaxes", "fp32", float(num_weights * ELEMENT_BYTES["fp32"])
    ends = sum(chunk.has_embedding or chunk.has_head for chunk in chunks)
    tied = not config.model.untie_embeddings_and_output_weights
    if tied and ends and layout.pipeline_model_parallel_size > 1:
        elements = layout.padded_vocab_size_per_rank * config.model.hidden_size
        yield "tied embedding's all-reduce of gradients", grads, float(elements * size)
