"""Owns days and GPU-hours of a token budget at a stated MFU, and whether FP8 pays at these sizes. Imports no torch.

MFU is the share of the GPUs' dense BF16 peak that the model's own FLOPs take (`FlopsPerToken.model`: causal attention,
nothing counted twice for recomputation), in every number format: so FP8 is seen as a higher MFU, and two runs of one
model compare by it. A share of the FP8 peak is given beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.config.warn import fp8_seconds
from megatron_fp8.planner.flops import FlopsPerToken
from megatron_fp8.planner.gpus import Gpu

DEFAULT_MFU = 0.4
MFU_FORMAT = "bf16"
_SECONDS_PER_DAY, _SECONDS_PER_HOUR = 86400.0, 3600.0


@dataclass(frozen=True)
class Duration:
    """What training on `num_tokens` takes at a share `mfu` of the dense BF16 peak.

    `tflops_per_gpu`: model TFLOP/s of each. `share_of_fp8_peak`: None where the GPU has no FP8 or the run no use of it.
    `withheld`: why the numbers before it are None.
    """

    num_tokens: float
    mfu: float
    days: float | None
    gpu_hours: float | None
    tokens_per_second: float | None
    tflops_per_gpu: float | None
    share_of_fp8_peak: float | None
    withheld: str | None


@dataclass(frozen=True)
class Fp8Gain:
    """Estimated microseconds of a layer and micro-batch on an H100: `saved` by FP8 GEMMs, `spent` on casts.

    `pays_from_tokens`: tokens per micro-batch from which more is saved than spent at these widths; None: never.
    """

    saved_us: float
    spent_us: float
    pays_from_tokens: int | None


def duration(
    config: Config, layout: Layout, flops: FlopsPerToken, gpu: Gpu, num_tokens: float, mfu: float = DEFAULT_MFU
) -> Duration:
    """Days and GPU-hours of a training run; withheld with a reason where the GPU's peak is unknown."""
    mode, peak = config.precision.mode, gpu.peak_flops(MFU_FORMAT)
    unknown = gpu.peak_flops(mode) is None
    if peak is None or unknown or num_tokens == 0:
        why = gpu.why_unknown(mode) if unknown else "the config does not say on how many tokens it trains"
        return Duration(num_tokens, mfu, None, None, None, None, None, why)
    rate = mfu * peak
    tokens_per_second = rate * layout.world_size / flops.model
    seconds = num_tokens / tokens_per_second
    fp8_peak = gpu.peak_flops("fp8") if mode == "fp8" else None
    return Duration(
        num_tokens=num_tokens,
        mfu=mfu,
        days=seconds / _SECONDS_PER_DAY,
        gpu_hours=seconds / _SECONDS_PER_HOUR * layout.world_size,
        tokens_per_second=tokens_per_second,
        tflops_per_gpu=rate / 1e12,
        share_of_fp8_peak=None if fp8_peak is None else rate / fp8_peak,
        withheld=None,
    )


def fp8_gain(layout: Layout) -> Fp8Gain:
    """Whether FP8 pays: its GEMMs win with tokens times width, its casts cost by tokens, weights and launches."""
    saved, spent = fp8_seconds(layout.gemms, layout.num_microbatches)
    tokens = layout.tokens_per_microbatch
    # Both grow in a straight line with the tokens; what the casts take of none is launches and weights.
    none = tuple(replace(gemm, num_tokens=0) for gemm in layout.gemms)
    fixed = fp8_seconds(none, layout.num_microbatches)[1]
    per_token = (saved - (spent - fixed)) / tokens
    pays_from = -int(-fixed // per_token) if per_token > 0 else None
    return Fp8Gain(saved * 1e6, spent * 1e6, pays_from)
