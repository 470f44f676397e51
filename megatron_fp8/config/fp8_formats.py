"""What follows from the `precision` section alone: the FP8 format and the layers outside FP8. Imports no torch."""

from __future__ import annotations

from typing import Literal

from megatron_fp8.config.schema_model import PrecisionConfig

E4M3_ONLY = ("blockwise", "mxfp8")
GEMMS = ("fprop", "dgrad", "wgrad")
LINEAR_LAYERS_PER_LAYER = 4


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


def linear_layers_in_fp8(config: PrecisionConfig, num_layers: int) -> tuple[int, int]:
    """(linear layers of the blocks that run in FP8, all of them): qkv, proj, fc1 and fc2 of each layer."""
    layers = num_layers - len(layers_in_bf16(config, num_layers)) if config.mode == "fp8" else 0
    return LINEAR_LAYERS_PER_LAYER * layers, LINEAR_LAYERS_PER_LAYER * num_layers


def describe_formats(config: PrecisionConfig, num_layers: int, arithmetic: str = "") -> str:
    """The formats of a run in one line; `arithmetic`: emulated or native, where that is known."""
    parts: list[str] = [config.mode]
    if config.mode == "fp8":
        parts[0] += f" {config.fp8_recipe} {resolved_fp8_format(config)}"
        if config.fp8_recipe == "delayed":
            parts.append(f"history {config.fp8_amax_history_len}")
        if config.fp8_param_gather:
            parts.append("primary weights in fp8")
    elif config.mode == "fp16":
        parts.append("dynamic loss scale" if config.loss_scale is None else f"loss scale {config.loss_scale:g}")
    if arithmetic:
        parts.append(arithmetic)
    in_fp8, total = linear_layers_in_fp8(config, num_layers)
    linear = f"{in_fp8} of {total} linear layers in fp8"
    overridden = [gemm for gemm, flag in zip(GEMMS, config.override_linear_precision, strict=True) if flag]
    if config.mode == "fp8" and overridden:
        linear += f", their {' and '.join(overridden)} in bf16"
    masters = "the fp32 parameters" if config.mode == "fp32" else config.main_params_dtype
    moments = " and ".join(dict.fromkeys((config.exp_avg_dtype, config.exp_avg_sq_dtype)))
    kept = f"masters {masters}, gradients {config.main_grads_dtype}, moments {moments}"
    return "; ".join((", ".join(parts), linear, kept))
