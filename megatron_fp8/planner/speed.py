"""Owns an estimate of a step's seconds on a GPU, by which layouts are ranked. Imports no torch.

Not a forecast: the shares of peaks and bandwidths that kernels reach are taken to be the same for every layout, and
messages that something else could hide are hidden whole. What it weighs against each other is what differs: waiting in
the pipeline, recomputation, messages within and between machines, casts and the optimizer's traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.config.warn import (
    BF16_FLOPS_PER_SECOND,
    CAST_BYTES_PER_SECOND,
    FP8_FLOPS_PER_SECOND,
    fp8_seconds,
)
from megatron_fp8.planner.activations import ActivationSizes, activation_sizes
from megatron_fp8.planner.communication import Traffic, step_traffic
from megatron_fp8.planner.flops import flops_per_token
from megatron_fp8.planner.gpus import GPUS, Board, Gpu
from megatron_fp8.planner.memory import MemoryKind, StageMemory
from megatron_fp8.planner.schedule import bubble_share
from megatron_fp8.planner.stages import Chunk, stage_chunks
from megatron_fp8.precision.chart_rows import Group

# Shares of the published numbers that large kernels and messages reach; the GEMMs' are those of `config/warn.py`.
_H100 = GPUS["h100-80g"].peaks_tflops
GEMM_SHARES = {
    "bf16": BF16_FLOPS_PER_SECOND / (_H100["bf16"] * 1e12),
    "fp16": BF16_FLOPS_PER_SECOND / (_H100["fp16"] * 1e12),
    "fp8": FP8_FLOPS_PER_SECOND / (_H100["fp8"] * 1e12),
}
ATTENTION_SHARE = 0.5
MEMORY_SHARE, NVLINK_SHARE, NETWORK_SHARE = 0.75, 0.7, 0.8
# Norms, activation, residual sums and RoPE read and write what a layer keeps about so often: in both passes, and in a
# second forward pass.
_PASSES_OVER_ACTIVATIONS, _PASSES_AGAIN = 4.0, 1.5
# The optimizer reads gradients, masters and moments and writes the latter two.
_OPTIMIZER_KINDS = {
    MemoryKind.GRADIENTS: 1,
    MemoryKind.MASTER_WEIGHTS: 2,
    MemoryKind.MOMENTS: 2,
    MemoryKind.WEIGHTS: 1,
}


@dataclass(frozen=True)
class StepSeconds:
    """Estimated seconds of a step on its slowest stage.

    `compute`: GEMMs, attention and what goes through memory. `messages`: those that nothing hides. `waiting`: the
    pipeline's bubble. `optimizer`: its pass over its state.
    """

    compute: float
    messages: float
    waiting: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.compute + self.messages + self.waiting + self.optimizer


class UnknownPeakError(ValueError):
    """The GPU has no published peak for the run's format; the text says why."""


def step_seconds(
    config: Config, layout: Layout, gpu: Gpu, memories: list[StageMemory], gpus_per_node: int
) -> StepSeconds:
    """The estimate for `layout`, whose stages take `memories`. Raises UnknownPeakError."""
    mode = config.precision.mode
    peak, bf16 = gpu.peak_flops(mode), gpu.peak_flops("bf16")
    if peak is None or bf16 is None or gpu.board is None:
        raise UnknownPeakError(gpu.why_unknown(mode))
    sizes = activation_sizes(config, layout, gpu)
    slowest: StepSeconds | None = None
    seen: set[tuple[Chunk, ...]] = set()
    for stage, memory in enumerate(memories):
        chunks = stage_chunks(config, layout, stage)
        if chunks in seen:  # in the middle of the pipeline one stage is like another
            continue
        seen.add(chunks)
        compute = _gemm_seconds(config, layout, chunks, peak * GEMM_SHARES[mode], bf16)
        rate = MEMORY_SHARE * gpu.board.memory_gb_per_s * 1e9
        compute += layout.num_microbatches * _bytes_through_memory(chunks, sizes) / rate
        if mode == "fp8":
            spent = fp8_seconds(layout.gemms, layout.num_microbatches)[1] * CAST_BYTES_PER_SECOND / rate
            compute += layout.num_microbatches * sum(chunk.num_fp8_layers for chunk in chunks) * spent
        traffic = [item for item in step_traffic(config, layout, stage) if item.waits]
        messages = sum(_message_seconds(item, layout, gpu.board, gpus_per_node) for item in traffic)
        share = bubble_share(layout)
        waiting = (compute + messages) * share / (1 - share)
        optimizer = sum(times * memory.by_kind[kind] for kind, times in _OPTIMIZER_KINDS.items()) / rate
        seconds = StepSeconds(compute, messages, waiting, optimizer)
        if slowest is None or seconds.total > slowest.total:
            slowest = seconds
    assert slowest is not None
    return slowest


def _gemm_seconds(config: Config, layout: Layout, chunks: tuple[Chunk, ...], rate: float, bf16_peak: float) -> float:
    """Seconds of a stage's matrix products in a step, recomputation included."""
    flops = flops_per_token(config, layout)
    bf16_rate = bf16_peak * GEMM_SHARES["bf16"]
    layers = config.model.num_layers
    in_fp8 = sum(3 * chunk.num_fp8_layers + chunk.recomputed_fp8_layers for chunk in chunks) / layers
    others = sum(3 * chunk.num_other_layers + chunk.recomputed_other_layers for chunk in chunks) / layers
    seconds = flops.linear * (in_fp8 / rate + others / (bf16_rate if config.precision.mode == "fp8" else rate))
    # Half a forward pass of scores again in each backward pass.
    again = sum(chunk.num_layers for chunk in chunks) / layers / 2
    seconds += flops.attention * (in_fp8 + others + again) / (bf16_peak * ATTENTION_SHARE)
    seconds += 3 * flops.head * any(chunk.has_head for chunk in chunks) / bf16_rate
    tokens = layout.tokens_per_microbatch * layout.num_microbatches
    return seconds * tokens / layout.tensor_model_parallel_size


def _bytes_through_memory(chunks: tuple[Chunk, ...], sizes: ActivationSizes) -> float:
    """What a micro-batch reads and writes outside matrix products."""
    once = sum(chunk.num_fp8_layers * sizes.fp8_layer + chunk.num_other_layers * sizes.other_layer for chunk in chunks)
    again = sum(
        chunk.recomputed_fp8_layers * sizes.fp8_layer + chunk.recomputed_other_layers * sizes.other_layer
        for chunk in chunks
    )
    return _PASSES_OVER_ACTIVATIONS * (once + sum(chunk.has_head for chunk in chunks) * sizes.logits) + (
        _PASSES_AGAIN * again
    )


def _message_seconds(item: Traffic, layout: Layout, board: Board, gpus_per_node: int) -> float:
    """Seconds of one kind of message; ranks are placed tensor-parallel first, then data-parallel, then stages."""
    tp, dp = layout.tensor_model_parallel_size, layout.data_parallel_size
    span = {Group.TP: tp, Group.DP: tp * dp, Group.TP_AND_DP: tp * dp}.get(item.message.group, layout.world_size)
    nvlink, network = NVLINK_SHARE * board.nvlink_gb_per_s, NETWORK_SHARE * board.network_gb_per_s
    return item.sent_bytes / (1e9 * (nvlink if span <= gpus_per_node else network))
