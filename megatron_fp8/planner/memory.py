"""Predicts the bytes that a rank of each pipeline stage holds at its peak, by kind. Imports no torch.

Weights, copies, master weights, moments, gradients and what a layer keeps for backward are the precision chart's;
here are the numbers of parameters, layers and micro-batches in flight, dropout masks and the model's two ends. What is
held only inside a kernel or for moments of a backward pass is `MemoryKind.WORKING`; that alone is an estimate.
`tests/planner` compares the rest with real tensors, and the total with a step's peak. Memory that is no tensor of the
run (CUDA context, NCCL's buffers, fragmentation) is not here; `search` leaves room for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from megatron_fp8.config.attention import kept_score_bytes, score_tensor_bytes, unfused_attention
from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.gpus import Gpu
from megatron_fp8.planner.pipeline import Chunk, RankParameters, rank_parameters, stage_chunks, stage_passes
from megatron_fp8.precision.chart import AMAXES_PER_LAYER, activation_rows, logits_rows, run_formats, weight_rows
from megatron_fp8.precision.chart_rows import FP32_BYTES, Formats, Note, Tensor

_ID_BYTES, _BOOL_BYTES = 8, 1


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
    """Bytes of a rank of pipeline stage `stage`, by kind; every kind has an entry."""

    stage: int
    by_kind: dict[MemoryKind, float]

    @property
    def total(self) -> float:
        """All kinds."""
        return sum(self.by_kind.values())


def stage_memories(config: Config, layout: Layout, gpu: Gpu) -> list[StageMemory]:
    """The memory of a rank of each stage; ranks of one stage differ by padding alone."""
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
    """What the micro-batches in flight keep at the peak."""
    # After the warm-up the schedule repeats itself; a few groups of micro-batches reach the peak of a thousand.
    count = min(layout.num_microbatches, 3 * layout.pipeline_model_parallel_size)
    now = most = KeptBytes(0.0, 0.0)
    for step in stage_passes(layout, stage, count):
        chunk, sign = chunks[step.chunk], 1 if step.is_forward else -1
        now = KeptBytes(now.layers + sign * chunk.layers, now.logits + sign * chunk.logits)
        if now.total > most.total:
            most = now
    return most


def _placeholders(config: Config, layout: Layout, formats: Formats, chunks: tuple[Chunk, ...]) -> float:
    """TE's stand-ins for gradients that are already in Megatron's buffer: one for each weight shape of `Linear` and
    `LayerNormLinear`, cached for good (`get_dummy_wgrad`).
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
    """Activations in transit: a gathered input with sequence parallelism, one received and one sent for each chunk.

    Gradients and parameters are reduced and gathered in place.
    """
    size = 0.0
    if config.parallel.sequence_parallel and layout.tensor_model_parallel_size > 1:
        size += layout.tokens_per_microbatch * config.model.hidden_size * formats.params.bytes
    if layout.pipeline_model_parallel_size > 1:
        size += 2 * layout.num_chunks * sizes.hidden
    return size


def _working(layout: Layout, formats: Formats, sizes: ActivationSizes, chunks: tuple[Chunk, ...]) -> float:
    """The larger of what a layer's backward pass and what the head hold briefly.

    A layer: gradients of the MLP's two inner tensors and of the residual stream (two), casts of the larger of them, or
    unfused attention's scores before and after the softmax; if recomputed, also all that it keeps. The head: logits in
    the parameters' format beside those in FP32.
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


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that a micro-batch keeps in a chunk until its backward pass: for layers, and for the head's logits."""

    layers: float
    logits: float

    @property
    def total(self) -> float:
        """Both."""
        return self.layers + self.logits


@dataclass(frozen=True)
class ActivationSizes:
    """Bytes of one micro-batch on a rank.

    `fp8_layer`, `other_layer`: all that a layer keeps. `hidden`: the residual stream between two layers, which is what
    a recomputed layer keeps. `embedding`, `before_head`: what the two ends keep beside `logits`. `rope`: the table of
    angles, once a chunk. `scores`: one `[s, s]` tensor of unfused attention, 0 where it is fused.
    """

    fp8_layer: float
    other_layer: float
    hidden: float
    embedding: float
    before_head: float
    logits: float
    rope: float
    scores: float


def chunk_bytes(chunk: Chunk, sizes: ActivationSizes) -> KeptBytes:
    """What a micro-batch keeps between its two passes through the chunk."""
    layers = chunk.num_recomputed * sizes.hidden + sizes.rope
    layers += (chunk.num_fp8_layers - chunk.recomputed_fp8_layers) * sizes.fp8_layer
    layers += (chunk.num_other_layers - chunk.recomputed_other_layers) * sizes.other_layer
    layers += sizes.embedding if chunk.has_embedding else 0
    layers += sizes.before_head if chunk.has_head else 0
    return KeptBytes(layers, sizes.logits if chunk.has_head else 0)


def activation_sizes(config: Config, layout: Layout, gpu: Gpu) -> ActivationSizes:
    """The sizes that make up `chunk_bytes`."""
    model, tokens = config.model, layout.tokens_per_microbatch
    formats = run_formats(config)
    size = formats.params.bytes
    shared = layout.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    elements = tokens * model.hidden_size / shared
    masks = elements * (size if gpu.mask_bytes is None else gpu.mask_bytes) if model.hidden_dropout else 0.0
    per_norm = (2 if model.normalization == "LayerNorm" else 1) * FP32_BYTES * tokens / shared
    rope = layout.seq_length * layout.rotary_dim * FP32_BYTES
    positions = model.position_embedding_type == "learned_absolute"
    joined = _joined_weights(config, layout, size)
    found = unfused_attention(config, layout, gpu.attention)
    unfused = found is not None and found.is_certain
    beside = 2 * masks + joined + (_unfused_attention(config, layout, gpu) if unfused else 0.0)
    # Fused attention keeps its output, which the projection keeps in FP8 otherwise.
    in_fp8_only = unfused and formats.fp8 is not None and not formats.fp8.override.wgrad
    output = tokens * layout.attention_heads_per_rank * layout.kv_channels * size if in_fp8_only else 0.0
    (logits,) = (row.size for row in logits_rows(layout, formats) if row.tensor is Tensor.LOGITS)
    return ActivationSizes(
        # A mask after attention and one after the MLP.
        fp8_layer=_layer(config, layout, formats) + beside - output,
        other_layer=_layer(config, layout, without_fp8(formats)) + beside,
        hidden=elements * size,
        # The tokens themselves, and the positions of one sample.
        embedding=tokens * _ID_BYTES + (layout.seq_length * _ID_BYTES if positions else 0) + masks,
        # Final norm's input and statistics, the head's input; which logits are the labels', and where.
        before_head=2 * elements * size + per_norm + tokens * (_ID_BYTES + _BOOL_BYTES),
        logits=logits * tokens,
        rope=0.0 if positions else rope,
        scores=score_tensor_bytes(config, layout) if unfused else 0.0,
    )


def without_fp8(formats: Formats) -> Formats:
    """The formats in the layers that stay out of FP8."""
    return replace(formats, policy=replace(formats.policy, fp8=None))


def _joined_weights(config: Config, layout: Layout, element_bytes: int) -> float:
    """Query, key and value weights that TE concatenates for each micro-batch's forward pass, and keeps.

    Only where Megatron's buffer for the distributed optimizer holds them in another order; else they are adjacent.
    Without pipeline stages its schedule keeps the previous micro-batch's loss, and so the copies its graph refers to.
    """
    if config.model.fuse_qkv_params or not config.parallel.use_distributed_optimizer:
        return 0.0
    qkv = layout.gemms[0]
    copies = 2 if layout.pipeline_model_parallel_size == 1 and layout.num_microbatches > 1 else 1
    return float(copies * qkv.out_features * qkv.in_features * element_bytes)


def _unfused_attention(config: Config, layout: Layout, gpu: Gpu) -> float:
    """What a layer keeps beyond fused attention: scores, keys and values repeated for each query head.

    Minus the statistics, of which fused attention keeps one for each query.
    """
    heads, tokens = layout.attention_heads_per_rank, layout.tokens_per_microbatch
    size = run_formats(config).params.bytes
    grouped = layout.num_query_groups != config.model.num_attention_heads
    repeated = 2 * heads * layout.kv_channels * size if grouped else 0
    kept = kept_score_bytes(config, layout, size if gpu.mask_bytes is None else gpu.mask_bytes)
    return kept + tokens * (repeated - heads * FP32_BYTES)


def _layer(config: Config, layout: Layout, formats: Formats) -> float:
    """All that a layer keeps which is not recomputed."""
    kept = config.model_copy(update={"model": config.model.model_copy(update={"recompute_granularity": "none"})})
    return sum(row.size for row in activation_rows(kept, layout, formats)) * layout.tokens_per_microbatch
