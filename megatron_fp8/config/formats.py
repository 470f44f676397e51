"""Owns what follows from the `precision` section alone: the FP8 format and the layers outside FP8. Imports no torch."""

from __future__ import annotations

from typing import Literal

from megatron_fp8.config.precision import PrecisionConfig

E4M3_ONLY = ("blockwise", "mxfp8")


def resolved_fp8_format(config: PrecisionConfig) -> Literal["hybrid", "e4m3"]:
    """`fp8_format`, or what the recipe has by default: blocks and MXFP8 are defined with E4M3 alone."""
    if config.fp8_format is not None:
        return config.fp8_format
    return "e4m3" if config.fp8_recipe in E4M3_ONLY else "hybrid"


def layers_in_bf16(config: PrecisionConfig, num_layers: int) -> frozenset[int]:
    """Layers of the whole model, from 0, that the config keeps out of FP8."""
    layers = set(config.bf16_layers)
    if config.first_last_layers_bf16:
        layers.update(range(min(config.num_layers_at_start_in_bf16, num_layers)))
        layers.update(range(max(num_layers - config.num_layers_at_end_in_bf16, 0), num_layers))
    return frozenset(layers)
