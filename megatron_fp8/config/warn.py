"""Owns what is allowed in a config and still worth a word: keys without effect, FP8 too small to pay, idle stages.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.fields import config_fields
from megatron_fp8.config.layout import GemmShape, Layout
from megatron_fp8.config.load import DEFAULT, LoadedConfig
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.rules_model import PP
from megatron_fp8.config.rules_parallel import GLOBAL_BATCH
from megatron_fp8.config.schema import Config

# Rates that large GEMMs and casts reach on an H100 SXM, about two thirds of its peaks.
_BF16_FLOPS_PER_SECOND = 600e12
_FP8_FLOPS_PER_SECOND = 1100e12
_CAST_BYTES_PER_SECOND = 2.5e12
# A cast reads two bytes of BF16 and writes one FP8 byte twice: as it is and transposed.
_CAST_BYTES_PER_ELEMENT = 4
_SECONDS_PER_LAUNCH = 5e-6
_CASTS_PER_GEMM = 3


def config_warnings(loaded: LoadedConfig, layout: Layout | None) -> list[Problem]:
    """What a person may want to know although the run can start; `layout` is None without a world size."""
    warnings = list(_keys_without_effect(loaded))
    config, origins = loaded.config, loaded.origins
    if layout is None:
        return warnings
    if config.precision.mode == "fp8":
        saved, spent = fp8_seconds(layout.gemms, layout.num_microbatches)
        if saved < spent:
            warnings.append(
                Problem(
                    "precision.mode",
                    "fp8",
                    f"at these sizes FP8 is slower than BF16: on an H100 its GEMMs save about {1e6 * saved:.0f} "
                    f"us per layer and micro-batch, its casts take about {1e6 * spent:.0f} us",
                    "precision.mode=bf16 where speed matters; larger per-rank sizes",
                    origins["precision.mode"],
                )
            )
    if layout.num_microbatches < layout.pipeline_model_parallel_size:
        warnings.append(
            Problem(
                GLOBAL_BATCH,
                layout.global_batch_size,
                f"it makes {layout.num_microbatches} micro-batches for {PP}="
                f"{layout.pipeline_model_parallel_size} stages: some stages always wait",
                "a larger global batch, smaller micro-batches or fewer stages",
                origins[GLOBAL_BATCH],
            )
        )
    return warnings


def fp8_seconds(gemms: tuple[GemmShape, ...], num_microbatches: int) -> tuple[float, float]:
    """Estimated (seconds saved by FP8 GEMMs, seconds spent on casts) of a layer and micro-batch on an H100.

    Casts: input and output gradient each micro-batch, the weight once a step.
    """
    saved = spent = 0.0
    for gemm in gemms:
        flops = 3 * 2 * gemm.num_tokens * gemm.in_features * gemm.out_features
        saved += flops * (1 / _BF16_FLOPS_PER_SECOND - 1 / _FP8_FLOPS_PER_SECOND)
        elements = gemm.num_tokens * (gemm.in_features + gemm.out_features)
        elements += gemm.in_features * gemm.out_features // num_microbatches
        spent += elements * _CAST_BYTES_PER_ELEMENT / _CAST_BYTES_PER_SECOND
        spent += _CASTS_PER_GEMM * _SECONDS_PER_LAUNCH
    return saved, spent


def _keys_without_effect(loaded: LoadedConfig) -> Iterator[Problem]:
    """Keys that were set to something else than their default and change nothing."""
    fields = config_fields()
    for keys, reason, use in _idle_keys(loaded.config):
        for key in keys:
            spec = fields[key]
            value = getattr(getattr(loaded.config, spec.section), spec.name)
            if loaded.origins[key] != DEFAULT and value != spec.default:
                yield Problem(key, value, f"it has no effect: {reason}", use, loaded.origins[key])


def _idle_keys(config: Config) -> Iterator[tuple[list[str], str, str]]:
    """(keys, why they do nothing under this config, what would make them count)."""
    model, optimizer = config.model, config.optimizer
    if config.precision.mode != "fp8":
        keys = [key for key in config_fields() if key.startswith("precision.") and key != "precision.mode"]
        yield keys, f"precision.mode is {config.precision.mode}", "precision.mode=fp8, or leave the key out"
    if optimizer.lr_decay_style != "WSD":
        keys = ["optimizer.lr_wsd_decay_style", "optimizer.lr_wsd_decay_iters"]
        style = f"optimizer.lr_decay_style is {optimizer.lr_decay_style}"
        yield keys, style, "optimizer.lr_decay_style=WSD, or leave the key out"
    if optimizer.lr_decay_style == "constant":
        keys = ["optimizer.min_lr", "optimizer.lr_decay_iters"]
        yield keys, "optimizer.lr_decay_style is constant", "another optimizer.lr_decay_style"
    if optimizer.lr_warmup_iters == 0:
        yield ["optimizer.lr_warmup_init"], "there is no warm-up", "optimizer.lr_warmup_iters above 0"
    if model.position_embedding_type == "rope":
        reason = "model.position_embedding_type is rope"
        yield ["model.max_position_embeddings"], reason, "leave the key out"
    else:
        reason = f"model.position_embedding_type is {model.position_embedding_type}"
        yield ["model.rotary_base", "model.rotary_percent"], reason, "leave the key out"
    if model.recompute_granularity == "none":
        reason = "model.recompute_granularity is none"
        yield ["model.recompute_num_layers"], reason, "model.recompute_granularity=full"
    if config.training.eval_iters == 0:
        yield ["data.valid_data_path"], "training.eval_iters is 0", "training.eval_iters above 0"
