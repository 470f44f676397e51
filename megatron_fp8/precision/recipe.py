"""Owns the precision policy as plain data: what the config's `precision` section means. Imports no torch."""

from dataclasses import dataclass

from megatron_fp8.config.schema import PrecisionConfig


@dataclass(frozen=True)
class DelayedScalingPolicy:
    """FP8 with scales from the history of earlier steps' amaxes.

    `fp8_format`: `hybrid` (E4M3 forward, E5M2 backward) or `e4m3`. `margin`: head-room in powers of two.
    """

    fp8_format: str
    margin: int
    amax_history_len: int
    amax_compute_algo: str


@dataclass(frozen=True)
class PrecisionPolicy:
    """Formats of the run. Masters, gradients, reductions and optimizer state are FP32 in every mode.

    `params_dtype`: name of the torch dtype of parameters and of the residual stream.
    """

    mode: str
    params_dtype: str
    delayed: DelayedScalingPolicy | None
    amax_reduction: str


def build_policy(config: PrecisionConfig) -> PrecisionPolicy:
    """The policy that the config asks for."""
    delayed = None
    if config.mode == "fp8":
        delayed = DelayedScalingPolicy(
            fp8_format=config.fp8_format,
            margin=config.fp8_margin,
            amax_history_len=config.fp8_amax_history_len,
            amax_compute_algo=config.fp8_amax_compute_algo,
        )
    return PrecisionPolicy(
        mode=config.mode,
        params_dtype="float32" if config.mode == "fp32" else "bfloat16",
        delayed=delayed,
        amax_reduction=config.amax_reduction,
    )
