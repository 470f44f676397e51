"""Owns the bytes that a rank of each pipeline stage holds when it holds most, by kind. Imports no torch.

Weights, copies, masters, moments and gradients follow the precision chart; activations the stage's schedule. What is
held only inside a kernel or for moments of a backward pass is `WORKING`; that alone is an estimate. `tests/planner`
holds the rest against real tensors, and the total against a step's peak. Memory that is no tensor of the run (CUDA
context, NCCL's buffers, fragments) is not here; `search` leaves room for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.activations import (
    ActivationSizes,
    KeptBytes,
    activation_sizes,
    chunk_bytes,
)
from megatron_fp8.planner.gpus import Gpu
from megatron_fp8.planner.parameters import RankParameters, rank_parameters
from megatron_fp8.planner.schedule import stage_passes
from megatron_fp8.planner.stages import Chunk, stage_chunks
from megatron_fp8.precision.chart import AMAXES_PER_LAYER, run_formats, weight_rows
from megatron_fp8.precision.chart_rows import FP32_BYTES, Formats, Note, Tensor


class MemoryKind(Enum):
    """What a rank's memory holds. The values are the keys of `plan --json`."""

    WEIGHTS = "weights"
    FP8_COPIES = "FP8 copies"
    FP8_TRANSPOSES = "FP8 transposes"
    MASTER_WEIGHTS = "masters"
    MOMENTS = "moments"
    GRADIENTS = "gradients"
    SCALING_STATE = "FP8 scaling state"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    BUFFERS = "buffers"
    COMMUNICATION = "communication"
    WORKING = "working memory (estimate)"


# Rows of the chart -> (kind, number of which parameters).
_CHART_KINDS = {
    Tensor.WEIGHTS: (MemoryKind.WEIGHTS, "total"),
    Tensor.FP8_LINEAR_WEIGHTS: (MemoryKind.WEIGHTS, "fp8_gemm_weights"),
    Tensor.OTHER_WEIGHTS: (MemoryKind.WEIGHTS, "others"),
    Tensor.FP8_COPY: (MemoryKind.FP8_COPIES, "fp8_gemm_weights"),
    Tensor.FP8_TRANSPOSE: (MemoryKind.FP8_TRANSPOSES, "fp8_gemm_weights"),
    Tensor.MASTER_WEIGHTS: (MemoryKind.MASTER_WEIGHTS, "total"),
    Tensor.FIRST_MOMENT: (MemoryKind.MOMENTS, "total"),
    Tensor.SECOND_MOMENT: (MemoryKind.MOMENTS, "total"),
    Tensor.WEIGHT_GRADS: (MemoryKind.GRADIENTS, "total"),
}


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank of pipeline stage `stage`, by kind; every kind is there."""

    stage: int
    by_kind: dict[MemoryKind, float]

    @property
    def total(self) -> float:
        """All kinds."""
        return sum(self.by_kind.values())


def stage_memories(config: Config, layout: Layout, gpu: Gpu) -> list[StageMemory]:
    """The memory of a rank of every stage; ranks of one stage differ by padding alone."""
    sizes = activation_sizes(config, layout, gpu)
    return [_stage_memory(config, layout, gpu, sizes, stage) for stage in range(layout.pipeline_model_parallel_size)]


def _stage_memory(config: Config, layout: Layout, gpu: Gpu, sizes: ActivationSizes, stage: int) -> StageMemory:
    formats = run_formats(config)
    chunks = stage_chunks(config, layout, stage)
    by_kind = dict.fromkeys(MemoryKind, 0.0)
    for kind, size in _of_parameters(config, layout, gpu, formats, rank_parameters(config, layout, chunks)):
        by_kind[kind] += size
    by_kind[MemoryKind.SCALING_STATE] = _scaling_state(formats, chunks)
    kept = most_kept(layout, stage, [chunk_bytes(chunk, sizes) for chunk in chunks])
    by_kind[MemoryKind.ACTIVATIONS], by_kind[MemoryKind.LOGITS] = kept.layers, kept.logits
    by_kind[MemoryKind.BUFFERS] = gpu.gemm_workspace_bytes + _placeholders(config, layout, formats, chunks)
    by_kind[MemoryKind.COMMUNICATION] = _communication(config, layout, formats, sizes)
    by_kind[MemoryKind.WORKING] = _working(layout, formats, sizes, chunks)
    return StageMemory(stage, by_kind)


def _of_parameters(
    config: Config, layout: Layout, gpu: Gpu, formats: Formats, parameters: RankParameters
) -> Iterator[tuple[MemoryKind, float]]:
    """What is kept of each parameter, by the precision chart."""
    for row in weight_rows(config, layout, formats):
        kind, of = _CHART_KINDS[row.tensor]
        if row.note is not Note.ONLY_IF_TRANSPOSED or gpu.keeps_transposes:
            yield kind, row.size * getattr(parameters, of)


def _scaling_state(formats: Formats, chunks: tuple[Chunk, ...]) -> float:
    """Amax histories of delayed scaling; the scales themselves are a few bytes."""
    fp8 = formats.fp8
    if fp8 is None or fp8.recipe != "delayed":
        return 0.0
    num_layers = sum(chunk.num_fp8_layers for chunk in chunks)
    return float(num_layers * AMAXES_PER_LAYER * fp8.amax_history_len * FP32_BYTES)


def most_kept(layout: Layout, stage: int, chunks: list[KeptBytes]) -> KeptBytes:
    """What the micro-batches that are under way keep at the moment when it is most."""
    # After the warm-up the schedule repeats itself; a few groups of micro-batches show all that a thousand would.
    count = min(layout.num_microbatches, 3 * layout.pipeline_model_parallel_size)
    now = most = KeptBytes(0.0, 0.0)
    for step in stage_passes(layout, stage, count):
        chunk, sign = chunks[step.chunk], 1 if step.is_forward else -1
        now = KeptBytes(now.layers + sign * chunk.layers, now.logits + sign * chunk.logits)
        if now.total > most.total:
            most = now
    return most


def _placeholders(config: Config, layout: Layout, formats: Formats, chunks: tuple[Chunk, ...]) -> float:
    """Tensors that TE gives autograd in place of gradients that are in Megatron's buffer already.

    One for each shape of a weight of TE's `Linear` and `LayerNormLinear`, kept for good (`get_dummy_wgrad`).
    """
    hidden = config.model.hidden_size
    qkv, proj = layout.gemms[0], layout.gemms[1]
    shapes = set()
    if config.model.fuse_qkv_params:
        shapes |= {(qkv.out_features, qkv.in_features), (proj.out_features, proj.in_features)}
    if any(chunk.has_head for chunk in chunks):
        shapes.add((layout.padded_vocab_size_per_rank, hidden))
    return float(sum(rows * columns for rows, columns in shapes) * formats.params.bytes)


def _communication(config: Config, layout: Layout, formats: Formats, sizes: ActivationSizes) -> float:
    """Activations on their way: a whole gathered input with sequence parallel, a received and a sent one of each chunk.

    Gradients and parameters are reduced and gathered in the buffers where they lie.
    """
    size = 0.0
    if config.parallel.sequence_parallel and layout.tensor_model_parallel_size > 1:
        size += layout.tokens_per_microbatch * config.model.hidden_size * formats.params.bytes
    if layout.pipeline_model_parallel_size > 1:
        size += 2 * layout.num_chunks * sizes.hidden
    return size


def _working(layout: Layout, formats: Formats, sizes: ActivationSizes, chunks: tuple[Chunk, ...]) -> float:
    """The larger of what a layer's backward pass and what the head hold for a moment.

    Of a layer: gradients of the MLP's two inner tensors and of the residual stream (two), casts of the larger of them,
    or of unfused attention's scores before and after the softmax; and of a recomputed one all that it keeps. Of the
    head: logits in the parameters' format beside those in FP32.
    """
    tokens, size = layout.tokens_per_microbatch, formats.params.bytes
    fc1, fc2 = layout.gemms[2], layout.gemms[3]
    casts = 2 if formats.fp8 is not None else 0
    inner = max(tokens * (fc1.out_features * (size + casts) + fc2.in_features * size), 2 * sizes.scores)
    layer = inner + 2 * sizes.hidden
    if any(chunk.recomputed_fp8_layers for chunk in chunks):
        layer += sizes.fp8_layer
    elif any(chunk.recomputed_other_layers for chunk in chunks):
        layer += sizes.other_layer
    head = any(chunk.has_head for chunk in chunks) * tokens * layout.padded_vocab_size_per_rank * size
    return max(layer, float(head))
