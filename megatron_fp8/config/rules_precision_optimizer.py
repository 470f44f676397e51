"""Owns which formats of masters, gradients, moments and primary weights Megatron's and TE's optimizers can keep.

Formats other than FP32 are those of Megatron's precision-aware optimizer, in which TE's `FusedAdam` holds the
masters. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.facts import Alternative, Facts, Finding

MAIN_PARAMS = "precision.main_params_dtype"
MAIN_GRADS = "precision.main_grads_dtype"
FORMATS = (MAIN_PARAMS, MAIN_GRADS, "precision.exp_avg_dtype", "precision.exp_avg_sq_dtype")
PARAM_GATHER = "precision.fp8_param_gather"
DISTRIBUTED = "parallel.use_distributed_optimizer"


def check_optimizer_formats(facts: Facts) -> Iterator[Finding]:
    """Every combination of formats that the optimizer would refuse, or get wrong without a word."""
    precision = facts.config.precision
    reduced = [key for key in FORMATS if facts.get(key) != "fp32"]
    if not facts.config.parallel.use_distributed_optimizer:
        for key in reduced:
            yield Finding(
                "optimizer format without shards",
                key,
                f"Megatron Core keeps formats other than fp32 only with {DISTRIBUTED}",
                (Alternative(DISTRIBUTED, [True]), Alternative(key, ["fp32"])),
            )
    if precision.mode == "fp32":
        for key in (key for key in reduced if key != MAIN_GRADS):
            yield Finding(
                "optimizer formats of FP32 parameters",
                key,
                "in mode fp32 the parameters are their own masters; with formats other than fp32 TE's FusedAdam keeps "
                "masters of its own, which are not what it reads",
                (Alternative(key, ["fp32"]), Alternative("precision.mode", ["bf16"])),
            )
    if precision.main_grads_dtype == "bf16" and precision.mode in ("fp32", "fp16"):
        yield Finding(
            "BF16 gradients",
            MAIN_GRADS,
            f"Megatron Core adds gradients up in FP32 or in the parameters' format, and that is {precision.mode}",
            (Alternative(MAIN_GRADS, ["fp32"]), Alternative("precision.mode", ["bf16"])),
        )
    if precision.mode == "fp8" and precision.fp8_param_gather:
        yield from _primary_weights(facts, reduced)


def _primary_weights(facts: Facts, reduced: list[str]) -> Iterator[Finding]:
    precision = facts.config.precision
    without = Alternative(PARAM_GATHER, [False])
    if not facts.config.parallel.use_distributed_optimizer:
        yield Finding(
            "FP8 weights without shards",
            PARAM_GATHER,
            f"Megatron Core writes FP32 masters into FP8 weights only with {DISTRIBUTED}, which gathers them",
            (Alternative(DISTRIBUTED, [True]), without),
        )
    if precision.fp8_recipe == "mxfp8":
        yield Finding(
            "FP8 weights in MXFP8",
            PARAM_GATHER,
            "MXFP8 keeps a weight twice, scaled along rows and along columns, and TE cannot put such a pair into the "
            "buffer that is gathered (`replace_raw_data`)",
            (without, Alternative("precision.fp8_recipe", ["blockwise", "tensorwise", "delayed"])),
        )
    if any(precision.override_linear_precision):
        key = "precision.override_linear_precision"
        yield Finding(
            "FP8 weights with overrides",
            PARAM_GATHER,
            f"{key} wants GEMMs to read weights in BF16, and there would be none: they are kept in FP8 only",
            (without, Alternative(key, [[False] * 3])),
        )
    if not facts.config.model.fuse_qkv_params:
        key = "model.fuse_qkv_params"
        yield Finding(
            "FP8 weights in parts",
            PARAM_GATHER,
            f"{key}=false keeps query, key and value weights apart, and TE does not join FP8 weights",
            (Alternative(key, [True]), without),
        )
    # FusedAdam makes the masters itself then, and for delayed scaling from the weights as FP8 has rounded them; for
    # the other recipes Megatron gives it no shard of an FP8 weight unless the masters are FP32 and Megatron's.
    wrong = reduced if precision.fp8_recipe == "delayed" else [key for key in reduced if key == MAIN_PARAMS]
    for key in wrong:
        reason = (
            "with delayed scaling the masters would start from weights that FP8 has rounded"
            if precision.fp8_recipe == "delayed"
            else f"with {precision.fp8_recipe} scaling Megatron Core makes FP32 masters of FP8 weights only"
        )
        yield Finding(
            "optimizer format with FP8 weights",
            key,
            f"{PARAM_GATHER} keeps weights in FP8, and {reason}",
            (Alternative(key, ["fp32"]), without),
        )
