"""Predicts the bytes that communication moves in a step, for a rank of each stage. Imports no torch.

What is sent per token, layer and parameter is the precision chart's (`collective_rows`, compared with real messages);
here is how often, and what no row has: gradients of what tensor-parallel ranks replicate, and of the tied embedding's
two copies. Scalars (losses, norms) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_fp8.config.layout import Layout, position_parameters
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.memory import without_fp8
from megatron_fp8.planner.pipeline import Chunk, RankParameters, rank_parameters, stage_chunks
from megatron_fp8.precision.chart import collective_rows, message_row, run_formats
from megatron_fp8.precision.chart_rows import (
    ChartRow,
    Collective,
    Format,
    Formats,
    Group,
    Per,
    Phase,
    Scales,
    Tensor,
)


@dataclass(frozen=True)
class Traffic:
    """The messages of one kind in a step, among `num_ranks` ranks.

    `row`: the kind, in the terms of the precision chart; its `size` is that of the whole tensors that the step moves.
    `sent_bytes`: what each rank sends, by a ring: 2 (n - 1) / n of an all-reduced tensor, (n - 1) / n of a gathered or
    scattered one, all of a sent one. `waits`: no computation overlaps it.
    """

    row: ChartRow
    num_ranks: int
    sent_bytes: float
    waits: bool


def step_traffic(config: Config, layout: Layout, stage: int) -> list[Traffic]:
    """The messages of a rank of `stage`, largest first."""
    found: dict[ChartRow, float] = {}
    for row, count in _counted_rows(config, layout, stage):
        kind = replace(row, size=0.0, per=Per.STEP)
        found[kind] = found.get(kind, 0.0) + row.size * count
    traffic = [_traffic(config, layout, replace(kind, size=size)) for kind, size in found.items() if size]
    return sorted(traffic, key=lambda item: -item.sent_bytes)


def _traffic(config: Config, layout: Layout, row: ChartRow) -> Traffic:
    tp, dp, parallel = layout.tensor_model_parallel_size, layout.data_parallel_size, config.parallel
    sizes: dict[Group | None, int] = {Group.TP: tp, Group.DP: dp, Group.TP_AND_DP: tp * dp}
    num_ranks = sizes.get(row.group, 2)
    reduced = row.collective in (Collective.ALL_REDUCE, Collective.ALL_REDUCE_MAX)
    share = 1.0 if row.collective is Collective.SEND else (num_ranks - 1) / num_ranks * (2 if reduced else 1)
    gathered = row.collective is Collective.ALL_GATHER
    overlaps = parallel.overlap_param_gather if gathered else parallel.overlap_grad_reduce
    return Traffic(row, num_ranks, share * row.size, waits=not (row.group is Group.DP and overlaps))


def _counted_rows(config: Config, layout: Layout, stage: int) -> Iterator[tuple[ChartRow, float]]:
    """Each row of the chart, and what has no row, with the number of units in a step that its size is given per."""
    formats = run_formats(config)
    chunks = stage_chunks(config, layout, stage)
    parameters = rank_parameters(config, layout, chunks)
    in_fp8 = sum(chunk.num_fp8_layers for chunk in chunks), sum(chunk.recomputed_fp8_layers for chunk in chunks)
    others = sum(chunk.num_other_layers for chunk in chunks), sum(chunk.recomputed_other_layers for chunk in chunks)
    # A layer in FP8 gathers other bytes than one outside; rows of no layer are the same in both charts.
    for layers_formats, (num_layers, recomputed) in ((formats, in_fp8), (without_fp8(formats), others)):
        for row in collective_rows(config, layout, layers_formats):
            count = _of_layers(row, layout, num_layers, recomputed)
            if count:
                yield row, count
    for row in collective_rows(config, layout, formats):
        yield row, _of_the_rest(row, layout, chunks, parameters)
    for row in _beside_the_chart(config, layout, formats, chunks, parameters):
        yield row, 1


def _of_layers(row: ChartRow, layout: Layout, num_layers: int, recomputed: int) -> float:
    """How many units the row is counted in, if those are layers; a recomputed forward pass communicates again."""
    match row.per:
        case Per.TOKEN_AND_LAYER:
            passes = num_layers + (recomputed if row.phase is Phase.FORWARD else 0)
            return passes * layout.tokens_per_microbatch * layout.num_microbatches
        case Per.LAYER_AND_MICROBATCH:
            return (num_layers + recomputed / 2) * layout.num_microbatches
        case Per.LAYER_AND_STEP:
            return num_layers
    return 0


def _of_the_rest(row: ChartRow, layout: Layout, chunks: tuple[Chunk, ...], parameters: RankParameters) -> float:
    """How many units the row is counted in, if those are not layers."""
    tokens = layout.tokens_per_microbatch * layout.num_microbatches
    first = sum(chunk.has_embedding for chunk in chunks)
    last = sum(chunk.has_head for chunk in chunks)
    match row.per:
        case Per.TOKEN:
            return tokens * (first if row.tensor is Tensor.EMBEDDING_OUTPUT else last)
        case Per.TOKEN_AND_STAGE:
            # Outputs of all chunks but the model's last, gradients of the inputs of all but its first.
            return tokens * (2 * len(chunks) - first - last)
        case Per.PARAMETER:
            counts = {Tensor.FP8_PARAMETERS: parameters.fp8_gemm_weights, Tensor.OTHER_PARAMETERS: parameters.others}
            return counts.get(row.tensor, parameters.total)
    return 0


def _beside_the_chart(
    config: Config, layout: Layout, formats: Formats, chunks: tuple[Chunk, ...], parameters: RankParameters
) -> Iterator[ChartRow]:
    grads = Format(formats.policy.optimizer.main_grads)

    def reduced(group: Group, tensor: Tensor, name: Format, elements: int) -> ChartRow:
        return message_row(group, Collective.ALL_REDUCE, tensor, name, float(elements * name.bytes), Per.STEP)

    if config.parallel.sequence_parallel and layout.tensor_model_parallel_size > 1:
        # Position embeddings see whole sequences on every rank.
        positions = sum(chunk.has_embedding for chunk in chunks) * position_parameters(config.model)
        yield reduced(Group.TP, Tensor.NORM_GRADS, grads, parameters.replicated - positions)
    per_tensor = formats.scales(Format.E4M3) is Scales.FP32_PER_TENSOR
    if formats.fp8 is not None and formats.fp8.param_gather and per_tensor and layout.data_parallel_size > 1:
        # One number for each of a layer's weights, when the master weights are cast.
        num_weights = len(layout.gemms) * sum(chunk.num_fp8_layers for chunk in chunks)
        yield reduced(Group.DP, Tensor.WEIGHT_AMAXES, Format.FP32, num_weights)
    ends = sum(chunk.has_embedding or chunk.has_head for chunk in chunks)
    tied = not config.model.untie_embeddings_and_output_weights
    if tied and ends and layout.pipeline_model_parallel_size > 1:
        elements = layout.padded_vocab_size_per_rank * config.model.hidden_size
        yield reduced(Group.ENDS, Tensor.TIED_EMBEDDING_GRADS, grads, elements)
