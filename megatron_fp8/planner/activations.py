"""Owns the bytes that one micro-batch keeps on a rank from its forward to its backward pass. Imports no torch.

What Transformer Engine's layer keeps is `precision/chart/activations.py`'s matter, which is held against real tensors;
here are the layers of a chunk, recomputed or not, with the dropout masks, and what the model's two ends keep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_fp8.config.attention import kept_score_bytes, score_tensor_bytes, unfused_attention
from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.gpus import Gpu
from megatron_fp8.planner.stages import Chunk
from megatron_fp8.precision.chart import activation_rows, logits_rows, run_formats
from megatron_fp8.precision.chart_rows import FP32_BYTES, Formats, Tensor

_ID_BYTES, _BOOL_BYTES = 8, 1


@dataclass(frozen=True)
class KeptBytes:
    """What a micro-batch keeps in a chunk, in bytes: of its layers, and of the head's logits."""

    layers: float
    logits: float

    @property
    def total(self) -> float:
        """Both."""
        return self.layers + self.logits


@dataclass(frozen=True)
class ActivationSizes:
    """Bytes of one micro-batch on a rank.

    `fp8_layer`, `other_layer`: all that a layer keeps. `layer_input`: what a recomputed layer keeps. `hidden`: the
    residual stream between two layers. `embedding`, `before_head`: what the two ends keep beside `logits`. `rope`:
    the table of angles, once a chunk. `scores`: one `[s, s]` tensor of unfused attention, 0 where it is fused.
    """

    fp8_layer: float
    other_layer: float
    layer_input: float
    hidden: float
    embedding: float
    before_head: float
    logits: float
    rope: float
    scores: float


def chunk_bytes(chunk: Chunk, sizes: ActivationSizes) -> KeptBytes:
    """What a micro-batch keeps between its two passes through the chunk."""
    layers = chunk.num_recomputed * sizes.layer_input + sizes.rope
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
    (logits,) = (row.size for row in logits_rows(layout, formats) if row.tensor is Tensor.LOGITS)
    return ActivationSizes(
        # A mask after attention and one after the MLP.
        fp8_layer=_layer(config, layout, formats) + beside,
        other_layer=_layer(config, layout, without_fp8(formats)) + beside,
        layer_input=elements * size,
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
    """Query, key and value weights that TE copies into one for each micro-batch's forward pass, and keeps.

    Only where Megatron's buffer for the distributed optimizer holds them in another order; else they lie side by side.
    Without stages its schedule keeps the loss of the micro-batch before, and so the copies that TE's nodes refer to.
    """
    if config.model.fuse_qkv_params or not config.parallel.use_distributed_optimizer:
        return 0.0
    qkv = layout.gemms[0]
    copies = 2 if layout.pipeline_model_parallel_size == 1 and layout.num_microbatches > 1 else 1
    return float(copies * qkv.out_features * qkv.in_features * element_bytes)


def _unfused_attention(config: Config, layout: Layout, gpu: Gpu) -> float:
    """What a layer keeps more than with fused attention: scores, and keys and values once for each query head.

    Less the statistics, of which fused attention keeps one for each query.
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
