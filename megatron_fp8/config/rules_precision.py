"""Rules for the `precision` section: formats, layers, scales, FP8 health.

Shapes are in `rules_precision_shapes.py`, masters and moments in `rules_precision_optimizer.py`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.facts import Alternative, Facts, Finding
from megatron_fp8.config.fp8_formats import E4M3_ONLY, layers_in_bf16
from megatron_fp8.config.rules_model import LAYERS, TP
from megatron_fp8.config.rules_precision_shapes import NOT_FP8, check_fp8_shapes, check_optimizer_formats

AMAX_REDUCTION = "precision.amax_reduction"
RECIPE = "precision.fp8_recipe"
OVERRIDE = "precision.override_linear_precision"
BF16_LAYERS = "precision.bf16_layers"
FIRST_LAST = "precision.first_last_layers_bf16"
AT_START = "precision.num_layers_at_start_in_bf16"
AT_END = "precision.num_layers_at_end_in_bf16"
HEALTH_INTERVAL = "precision.fp8_health_interval"
FALLBACK = "precision.fp8_fallback"
NUM_HEALTHY = "precision.fp8_fallback_num_healthy_checks"
INITIAL_SCALE = "precision.initial_loss_scale"
MIN_SCALE = "precision.min_loss_scale"


def check_precision(facts: Facts) -> Iterator[Finding]:
    """Every mistake of the formats; FP8's keys and shapes count only where precision.mode is fp8."""
    mode = facts.config.precision.mode
    if mode == "fp8":
        yield from _format(facts)
        yield from _amax_reduction(facts)
        yield from _layers(facts)
        yield from _override(facts)
        yield from _fallback(facts)
        yield from check_fp8_shapes(facts)
    if mode == "fp16":
        yield from _loss_scale(facts)
    yield from check_optimizer_formats(facts)


def _format(facts: Facts) -> Iterator[Finding]:
    precision = facts.config.precision
    if precision.fp8_format == "hybrid" and precision.fp8_recipe in E4M3_ONLY:
        yield Finding(
            "FP8 format of the recipe",
            "precision.fp8_format",
            f"{RECIPE}={precision.fp8_recipe} scales every small block, so it does not need E5M2's range: it is "
            "defined with E4M3 in both passes",
            (Alternative("precision.fp8_format", ["e4m3", None]), Alternative(RECIPE, ["tensorwise", "delayed"])),
        )


def _amax_reduction(facts: Facts) -> Iterator[Finding]:
    """Only delayed scales come from reduced amaxes; TE finds those of the other recipes where it needs them.

    `off` without sequence parallel is right: TP ranks quantize equal inputs alike, and exchange BF16. FP8 weights
    gathered over data-parallel ranks are right too: TE reduces their amaxes when it casts the masters.
    """
    precision, parallel = facts.config.precision, facts.config.parallel
    tp = parallel.tensor_model_parallel_size
    if precision.fp8_recipe != "delayed" or tp == 1:
        return
    if precision.amax_reduction == "data_parallel":
        yield Finding(
            "amax group",
            AMAX_REDUCTION,
            f"with {TP}={tp} the tensor-parallel ranks would use different scales for tensors that they share; "
            "such runs diverge after about a thousand steps",
            (
                Alternative(AMAX_REDUCTION, ["auto", "tensor_and_data_parallel"]),
                Alternative(TP, [1]),
            ),
        )
    if precision.amax_reduction == "off" and parallel.sequence_parallel:
        yield Finding(
            "amax group off",
            AMAX_REDUCTION,
            "with parallel.sequence_parallel, FP8 bytes are gathered from ranks with different scales but read "
            "with a single one",
            (Alternative(AMAX_REDUCTION, ["auto"]), Alternative("parallel.sequence_parallel", [False])),
        )


def _layers(facts: Facts) -> Iterator[Finding]:
    precision, num_layers = facts.config.precision, facts.config.model.num_layers
    layers = precision.bf16_layers
    inside = [layer for layer in layers if 0 <= layer < num_layers]
    if inside != layers:
        yield Finding(
            "BF16 layers outside",
            BF16_LAYERS,
            f"{LAYERS}={num_layers}: layers are numbered 0 to {num_layers - 1} over the whole model",
            (Alternative(BF16_LAYERS, [inside, []], most=1),),
        )
    once = list(dict.fromkeys(layers))
    if once != layers:
        yield Finding(
            "BF16 layers twice",
            BF16_LAYERS,
            "the list contains duplicate layers",
            (Alternative(BF16_LAYERS, [once]),),
        )
    at_start, at_end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    if precision.first_last_layers_bf16 and at_start + at_end > num_layers:
        yield Finding(
            "first and last layers",
            AT_START,
            f"together with {AT_END}={at_end} it exceeds {LAYERS}={num_layers}",
            (
                Alternative(AT_START, [1, 0], most=1),
                Alternative(AT_END, [1, 0], most=1),
                Alternative(FIRST_LAST, [False]),
            ),
        )
    elif len(layers_in_bf16(precision, num_layers).intersection(range(num_layers))) == num_layers:
        yield Finding(
            "no layer in FP8",
            "precision.mode",
            f"{BF16_LAYERS} and {FIRST_LAST} keep all {num_layers} layers in BF16, so nothing would run in FP8",
            (
                Alternative(BF16_LAYERS, [[]]),
                Alternative(FIRST_LAST, [False]),
                Alternative(AT_START, [at_start - 1, 0], most=1),
                Alternative(AT_END, [at_end - 1, 0], most=1),
                NOT_FP8,
            ),
        )


def _override(facts: Facts) -> Iterator[Finding]:
    if all(facts.config.precision.override_linear_precision):
        yield Finding(
            "no GEMM in FP8",
            OVERRIDE,
            "fprop, dgrad and wgrad are all overridden, so nothing would run in FP8",
            (Alternative(OVERRIDE, [[False, False, True], [False] * 3]), NOT_FP8),
        )
    precision, recompute = facts.config.precision, "model.recompute_granularity"
    fprop, *others = precision.override_linear_precision
    if fprop and precision.fp8_recipe == "delayed" and facts.get(recompute) == "full":
        yield Finding(
            "overridden fprop, recomputed",
            OVERRIDE,
            f"with fprop overridden and {recompute}=full, inputs are first quantized in the recomputed forward pass, "
            "whose amaxes TE discards: their scale would stay 1 forever",
            (
                Alternative(OVERRIDE, [[False, *others]]),
                Alternative("precision.fp8_recipe", ["tensorwise"]),
                Alternative(recompute, ["none"]),
            ),
        )

    fprop, dgrad, wgrad = precision.override_linear_precision
    fused, shards = "model.fuse_qkv_params", "parallel.use_distributed_optimizer"
    if (fprop or dgrad) and not facts.get(fused) and not facts.get(shards):
        # Megatron's buffer for the distributed optimizer holds the three in another order, so that TE copies them.
        yield Finding(
            "overridden GEMMs of weights in parts",
            OVERRIDE,
            f"with {fused}=false and {shards}=false TE concatenates the query, key and value weights without a copy; "
            "an overridden fprop or dgrad saves that view across the optimizer step, and autograd then rejects it",
            (
                Alternative(OVERRIDE, [[False, False, wgrad]]),
                Alternative(fused, [True]),
                Alternative(shards, [True]),
            ),
        )


def _fallback(facts: Facts) -> Iterator[Finding]:
    precision = facts.config.precision
    if precision.fp8_fallback and precision.fp8_health_interval == 0:
        yield Finding(
            "fallback without checks",
            FALLBACK,
            f"layers fall back when FP8 health checks exceed a limit, and {HEALTH_INTERVAL}=0 disables the checks",
            (Alternative(HEALTH_INTERVAL, [100]), Alternative(FALLBACK, [False])),
        )
    if precision.fp8_fallback and precision.fp8_param_gather:
        yield Finding(
            "fallback of FP8 weights",
            FALLBACK,
            "with precision.fp8_param_gather weights exist only in FP8, so no layer can fall back to BF16",
            (Alternative("precision.fp8_param_gather", [False]), Alternative(FALLBACK, [False])),
        )
    if precision.fp8_fallback and precision.fp8_fallback_num_healthy_checks and not facts.config.model.fuse_qkv_params:
        yield Finding(
            "return of unfused weights",
            NUM_HEALTHY,
            "with model.fuse_qkv_params=false the FP8 health of query, key and value weights is not measured while "
            "their layer runs in BF16",
            (Alternative(NUM_HEALTHY, [0]), Alternative("model.fuse_qkv_params", [True])),
        )


def _loss_scale(facts: Facts) -> Iterator[Finding]:
    precision = facts.config.precision
    if precision.loss_scale is None and precision.initial_loss_scale < precision.min_loss_scale:
        yield Finding(
            "loss scales",
            INITIAL_SCALE,
            f"must be at least {MIN_SCALE}={precision.min_loss_scale:g}, the lowest scale",
            (
                Alternative(INITIAL_SCALE, [2.0**32, precision.min_loss_scale], most=1),
                Alternative(MIN_SCALE, [min(1.0, precision.initial_loss_scale)]),
            ),
        )
