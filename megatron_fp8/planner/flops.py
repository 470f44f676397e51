"""Counts floating-point operations, and estimates a step's seconds and a run's days from them. Imports no torch.

2 for each multiply-add of a matrix product; norms, activations, softmax and RoPE are not counted, as in every published
count. Attention is causal: a query reads itself and the tokens before it, (s + 1) / 2 keys on average. Counts that take
all s keys (PaLM's appendix B, Narayanan et al. 2021, equation 3) come out higher.

MFU is the share of the GPUs' dense BF16 peak that the model's own FLOPs take (`FlopsPerToken.model`: causal attention,
nothing counted twice for recomputation), in every number format, so that FP8 shows as a higher MFU.

`step_seconds` ranks layouts; it is no forecast: the shares of peaks and bandwidths that kernels reach are the same for
every layout, and communication that something could overlap costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_fp8.config.config_warnings import (
    BF16_FLOPS_PER_SECOND,
    CAST_BYTES_PER_SECOND,
    FP8_FLOPS_PER_SECOND,
    fp8_seconds,
)
from megatron_fp8.config.layer_kinds import window_of
from megatron_fp8.config.layout import GemmShape, Layout, block_parameters
from megatron_fp8.config.schema import Config, ModelConfig
from megatron_fp8.planner.communication import Traffic, step_traffic
from megatron_fp8.planner.gpus import GPUS, Board, Gpu
from megatron_fp8.planner.memory import ActivationSizes, MemoryKind, StageMemory, activation_sizes
from megatron_fp8.planner.pipeline import Chunk, bubble_share, num_recomputed, stage_chunks
from megatron_fp8.precision.chart_rows import Group

DEFAULT_MFU = 0.4
MFU_FORMAT = "bf16"
# A backward pass multiplies twice: for the input's gradient and for the weight's (or for the other operand's).
_BACKWARD = 2.0
# Shares of the published numbers that large kernels and messages reach; the GEMMs' are those of FP8's break-even.
_H100 = GPUS["h100-80g"].peaks_tflops
GEMM_SHARES = {
    "bf16": BF16_FLOPS_PER_SECOND / (_H100["bf16"] * 1e12),
    "fp16": BF16_FLOPS_PER_SECOND / (_H100["fp16"] * 1e12),
    "fp8": FP8_FLOPS_PER_SECOND / (_H100["fp8"] * 1e12),
}
ATTENTION_SHARE = 0.5
MEMORY_SHARE, NVLINK_SHARE, NETWORK_SHARE = 0.75, 0.7, 0.8
# How often norms, activation, residual sums and RoPE read and write what a layer keeps: in both passes, and in a
# recomputed forward pass.
_PASSES_OVER_ACTIVATIONS, _RECOMPUTED_PASSES = 4.0, 1.5
# The optimizer reads gradients, master weights and moments, and writes the latter two and the weights.
_OPTIMIZER_PASSES = {
    MemoryKind.GRADIENTS: 1,
    MemoryKind.MASTER_WEIGHTS: 2,
    MemoryKind.MOMENTS: 2,
    MemoryKind.WEIGHTS: 1,
}


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of one token over all ranks. `linear`, `attention` and `head` are the three parts of a forward pass.

    `recompute`: second forward passes of recomputed layers. `scores_again`: fused attention's backward pass recomputes
    the scores. `all_keys`: what attention's forward pass would be with all s keys a query.
    """

    linear: float
    attention: float
    head: float
    recompute: float
    scores_again: float
    all_keys: float

    @property
    def forward(self) -> float:
        """One forward pass."""
        return self.linear + self.attention + self.head

    @property
    def backward(self) -> float:
        """One backward pass, without recomputation."""
        return _BACKWARD * self.forward

    @property
    def model(self) -> float:
        """What the model needs, however it is computed; MFU counts this."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """What is computed."""
        return self.model + self.recompute + self.scores_again

    @property
    def model_with_all_keys(self) -> float:
        """`model` as it is counted where causality is not."""
        return (1 + _BACKWARD) * (self.linear + self.all_keys + self.head)


def flops_per_token(config: Config, layout: Layout) -> FlopsPerToken:
    """FLOPs of one token of a full-length sample; masking between documents makes attention's share smaller."""
    model = config.model
    weights = sum(shape.size for shape in block_parameters(model) if shape.is_gemm_weight)
    linear = 2.0 * model.num_layers * weights
    # Scores and their product with the values.
    per_key = 2 * 2.0 * model.num_attention_heads * layout.kv_channels
    attention = per_key * sum(mean_keys(model, layer) for layer in range(model.num_layers))
    chunks = layout.pipeline_model_parallel_size * layout.num_chunks
    share = num_recomputed(config, layout.layers_per_chunk) * chunks / model.num_layers
    return FlopsPerToken(
        linear=linear,
        attention=attention,
        head=2.0 * model.hidden_size * layout.padded_vocab_size,
        recompute=share * (linear + attention),
        scores_again=attention / 2,
        all_keys=per_key * model.num_layers * model.seq_length,
    )


def mean_keys(model: ModelConfig, layer: int) -> float:
    """Keys that a query reads in a layer, on average over a sample: itself and those before it, in its window."""
    s, window = model.seq_length, window_of(model, layer)
    reach = s if window is None else min(window + 1, s)
    # The first `reach` queries read 1, 2, ... keys, the others `reach`.
    return reach - reach * (reach - 1) / (2 * s)


def step_gemms(layout: Layout, num_layers: int) -> list[tuple[GemmShape, int]]:
    """Linear layers of the model, the head included, and how often a step passes through each."""
    block = layout.gemms
    head = GemmShape("head", layout.tokens_per_microbatch, block[0].in_features, layout.padded_vocab_size)
    return [*((shape, num_layers * layout.num_microbatches) for shape in block), (head, layout.num_microbatches)]


def step_flops(layout: Layout, num_layers: int) -> int:
    """FLOPs of a step's linear layers and head: forward, dgrad and wgrad."""
    return sum(
        6 * count * shape.num_tokens * shape.in_features * shape.out_features
        for shape, count in step_gemms(layout, num_layers)
    )


@dataclass(frozen=True)
class Duration:
    """What training on `num_tokens` takes at a share `mfu` of the dense BF16 peak.

    `tflops_per_gpu`: model TFLOP/s of each. `share_of_fp8_peak`: None unless the run uses FP8 on a GPU that has it.
    `withheld`: why the numbers before it are None.
    """

    num_tokens: float
    mfu: float
    days: float | None = None
    gpu_hours: float | None = None
    tokens_per_second: float | None = None
    tflops_per_gpu: float | None = None
    share_of_fp8_peak: float | None = None
    withheld: str | None = None


def run_duration(
    config: Config, layout: Layout, flops: FlopsPerToken, gpu: Gpu, num_tokens: float, mfu: float = DEFAULT_MFU
) -> Duration:
    """Days and GPU-hours of a training run; withheld with a reason where the GPU's peak is unknown."""
    mode, peak = config.precision.mode, gpu.peak_flops(MFU_FORMAT)
    unknown = gpu.peak_flops(mode) is None
    if peak is None or unknown or num_tokens == 0:
        why = gpu.why_unknown(mode) if unknown else "the config does not say how many tokens it trains on"
        return Duration(num_tokens, mfu, withheld=why)
    rate = mfu * peak
    tokens_per_second = rate * layout.world_size / flops.model
    seconds = num_tokens / tokens_per_second
    fp8_peak = gpu.peak_flops("fp8") if mode == "fp8" else None
    return Duration(
        num_tokens=num_tokens,
        mfu=mfu,
        days=seconds / 86400.0,
        gpu_hours=seconds / 3600.0 * layout.world_size,
        tokens_per_second=tokens_per_second,
        tflops_per_gpu=rate / 1e12,
        share_of_fp8_peak=None if fp8_peak is None else rate / fp8_peak,
    )


@dataclass(frozen=True)
class Fp8Gain:
    """Estimated microseconds of a layer and micro-batch on an H100: `saved` by FP8 GEMMs, `spent` on casts.

    `pays_from_tokens`: tokens per micro-batch from which more is saved than spent at these widths; None: never.
    """

    saved_us: float
    spent_us: float
    pays_from_tokens: int | None


def fp8_gain(layout: Layout) -> Fp8Gain:
    """Whether FP8 pays: its GEMMs gain with tokens times width, its casts cost by tokens, weights and launches."""
    saved, spent = fp8_seconds(layout.gemms, layout.num_microbatches)
    # Both are linear in the tokens; what casts take without any is launches and weights.
    without_tokens = tuple(replace(gemm, num_tokens=0) for gemm in layout.gemms)
    fixed = fp8_seconds(without_tokens, layout.num_microbatches)[1]
    per_token = (saved - (spent - fixed)) / layout.tokens_per_microbatch
    pays_from = -int(-fixed // per_token) if per_token > 0 else None
    return Fp8Gain(saved * 1e6, spent * 1e6, pays_from)


@dataclass(frozen=True)
class StepSeconds:
    """Estimated seconds of a step on its slowest stage.

    `compute`: GEMMs, attention and memory-bound kernels. `exposed`: communication that nothing overlaps. `bubble`: the
    pipeline's. `optimizer`: its pass over its state.
    """

    compute: float
    exposed: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.compute + self.exposed + self.bubble + self.optimizer


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
    rate = MEMORY_SHARE * gpu.board.memory_gb_per_s * 1e9
    share = bubble_share(layout)
    # In the middle of the pipeline one stage is like another.
    stages = {stage_chunks(config, layout, stage): stage for stage in reversed(range(len(memories)))}
    estimates = []
    for chunks, stage in stages.items():
        compute = _gemm_seconds(config, layout, chunks, peak * GEMM_SHARES[mode], bf16)
        compute += layout.num_microbatches * _bytes_through_memory(chunks, sizes) / rate
        if mode == "fp8":
            casts = fp8_seconds(layout.gemms, layout.num_microbatches)[1] * CAST_BYTES_PER_SECOND / rate
            compute += layout.num_microbatches * sum(chunk.num_fp8_layers for chunk in chunks) * casts
        traffic = [item for item in step_traffic(config, layout, stage) if item.waits]
        exposed = sum(_message_seconds(item, layout, gpu.board, gpus_per_node) for item in traffic)
        bubble = (compute + exposed) * share / (1 - share)
        moved = sum(times * memories[stage].by_kind[kind] for kind, times in _OPTIMIZER_PASSES.items())
        estimates.append(StepSeconds(compute, exposed, bubble, moved / rate))
    return max(estimates, key=lambda seconds: seconds.total)


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
    once += sum(chunk.has_head for chunk in chunks) * sizes.logits
    recomputed = sum(
        chunk.recomputed_fp8_layers * sizes.fp8_layer + chunk.recomputed_other_layers * sizes.other_layer
        for chunk in chunks
    )
    return _PASSES_OVER_ACTIVATIONS * once + _RECOMPUTED_PASSES * recomputed


def _message_seconds(item: Traffic, layout: Layout, board: Board, gpus_per_node: int) -> float:
    """Seconds of one kind of message; ranks are placed tensor-parallel first, then data-parallel, then stages."""
    tp, dp = layout.tensor_model_parallel_size, layout.data_parallel_size
    spans: dict[Group | None, int] = {Group.TP: tp, Group.DP: tp * dp, Group.TP_AND_DP: tp * dp}
    span = spans.get(item.row.group, layout.world_size)
    nvlink, network = NVLINK_SHARE * board.nvlink_gb_per_s, NETWORK_SHARE * board.network_gb_per_s
    return item.sent_bytes / (1e9 * (nvlink if span <= gpus_per_node else network))
