"""Rules for the shapes that FP8 GEMMs accept.

TE refuses an FP8 operand unless its last dimension is a multiple of 16 and the product of the others one of 8
(`assert_dim_for_fp8_exec`), MXFP8 unless both are multiples of its block of 32 (`MXFP8Quantizer.is_quantizable`), and
it says so in the middle of a step. Blocks of 128 may be cut short at a tensor's edges. A layer's operands are input
`[tokens, in]` and weight `[out, in]` in the forward pass, output gradient `[tokens, out]` and weight `[in, out]` in
dgrad, output gradient `[out, tokens]` and input `[in, tokens]` in wgrad (FP8 tensor cores read both operands along
the summed dimension). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.facts import Alternative, Facts, Finding, divisors, multiples
from megatron_fp8.config.layout import LayoutError, head_size, mlp_size, qkv_rows, query_groups
from megatron_fp8.config.rules_model import FFN, GROUPS, HEADS, HIDDEN, KV_CHANNELS, SEQ_LENGTH, TP
from megatron_fp8.config.rules_parallel import MICRO_BATCH

# Multiples that the last dimension and the product of the others must be, by recipe.
_SMALLEST = {"delayed": (16, 8), "tensorwise": (16, 8), "blockwise": (16, 8), "mxfp8": (32, 32)}
NOT_FP8 = Alternative("precision.mode", ["bf16"])


def fp8_token_multiple(recipe: str) -> int:
    """Multiple that the tokens of a forward pass must be where there is no backward pass."""
    return _SMALLEST[recipe][1]


def check_fp8_shapes(facts: Facts) -> Iterator[Finding]:
    """Every dimension that an FP8 GEMM would refuse."""
    last, others = _SMALLEST[facts.config.precision.fp8_recipe]
    yield from _tokens(facts, last, others)
    yield from _hidden(facts, last)
    yield from _attention(facts, last)
    yield from _ffn(facts, last)


def _tokens(facts: Facts, last: int, others: int) -> Iterator[Finding]:
    config = facts.config
    seq_length, micro = config.model.seq_length, config.training.micro_batch_size
    num_tokens = seq_length * micro
    tp = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    alternatives = (
        Alternative(SEQ_LENGTH, multiples(seq_length, 2 * tp)),
        Alternative(MICRO_BATCH, multiples(micro)),
    )
    not_fp8 = _without(facts)
    if num_tokens % last:
        yield Finding(
            "FP8 tokens",
            SEQ_LENGTH,
            f"FP8 needs a multiple of {last} tokens per micro-batch, the last dimension in wgrad; "
            f"{MICRO_BATCH}={micro} gives {num_tokens}",
            (*alternatives, *not_fp8),
        )
    elif num_tokens % tp == 0 and num_tokens // tp % others:
        yield Finding(
            "FP8 tokens per rank",
            SEQ_LENGTH,
            f"FP8 needs a multiple of {others} tokens per rank and micro-batch; with {MICRO_BATCH}={micro} and "
            f"parallel.sequence_parallel over {TP}={tp} there are {num_tokens // tp}",
            (*alternatives, Alternative("parallel.sequence_parallel", [False]), *not_fp8),
        )


def _hidden(facts: Facts, last: int) -> Iterator[Finding]:
    hidden = facts.config.model.hidden_size
    if hidden % last:
        yield Finding(
            "FP8 hidden size",
            HIDDEN,
            f"FP8 needs a multiple of {last}: it is the last dimension of the qkv and fc1 inputs (fprop) and of "
            "the proj and fc2 output gradients (dgrad)",
            (Alternative(HIDDEN, multiples(hidden, last)), *_without(facts)),
        )


def _attention(facts: Facts, last: int) -> Iterator[Finding]:
    model, tp = facts.config.model, facts.config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, query_groups(model)
    try:
        size = head_size(model)
    except LayoutError:  # the rules of the model report what does not divide
        return
    if heads % tp or groups % tp:
        return
    proj_in, qkv_out = heads * size // tp, qkv_rows(model) // tp
    if qkv_out % last == 0 and proj_in % last == 0:
        return
    wrong = []
    if proj_in % last:
        wrong.append(f"proj input {heads} x {size} / {tp} = {proj_in} (fprop)")
    if qkv_out % last:
        wrong.append(f"qkv output ({heads} + 2 x {groups}) x {size} / {tp} = {qkv_out} (dgrad)")
    yield Finding(
        "FP8 attention",
        HEADS if model.kv_channels is None else KV_CHANNELS,
        f"FP8 needs last dimensions that are multiples of {last} on each of {TP}={tp} ranks; "
        f"head size {size} gives {', '.join(wrong)}",
        (
            Alternative(KV_CHANNELS, multiples(size, 2)),
            Alternative(HEADS, multiples(heads, tp)),
            *([Alternative(GROUPS, divisors(heads, groups))] if model.num_query_groups else []),
            Alternative(TP, divisors(heads, tp)),
            *_without(facts),
        ),
    )


def _ffn(facts: Facts, last: int) -> Iterator[Finding]:
    ffn, tp = mlp_size(facts.config.model), facts.config.parallel.tensor_model_parallel_size
    # fc1 has as many rows or twice as many: its own rule holds when fc2's does.
    if ffn % tp or ffn // tp % last == 0:
        return
    yield Finding(
        "FP8 FFN",
        FFN,
        f"FP8 needs a multiple of {last} inner features on each of {TP}={tp} ranks, not {ffn // tp}: they are the last "
        "dimension of the fc2 input (fprop) and, as fc1's rows, of its output gradient (dgrad)",
        (
            Alternative(FFN, multiples(ffn, last * tp)),
            Alternative(TP, divisors(ffn, tp)),
            *_without(facts),
        ),
        value=ffn,
    )


def _without(facts: Facts) -> tuple[Alternative, ...]:
    """Ways out that leave the sizes as they are: a recipe that asks for less, or no FP8."""
    if facts.config.precision.fp8_recipe == "mxfp8":
        return Alternative("precision.fp8_recipe", ["blockwise", "tensorwise"], most=1), NOT_FP8
    return (NOT_FP8,)


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
                f"Megatron Core supports formats other than fp32 only with {DISTRIBUTED}",
                (Alternative(DISTRIBUTED, [True]), Alternative(key, ["fp32"])),
            )
    if precision.mode == "fp32":
        for key in (key for key in reduced if key != MAIN_GRADS):
            yield Finding(
                "optimizer formats of FP32 parameters",
                key,
                "in mode fp32 the parameters are their own master weights; with other formats TE's FusedAdam keeps "
                "separate master weights and does not read them",
                (Alternative(key, ["fp32"]), Alternative("precision.mode", ["bf16"])),
            )
    if precision.main_grads_dtype == "bf16" and precision.mode in ("fp32", "fp16"):
        yield Finding(
            "BF16 gradients",
            MAIN_GRADS,
            f"Megatron Core accumulates gradients in FP32 or in the parameters' format, here {precision.mode}",
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
            f"Megatron Core writes FP32 master weights into FP8 weights only with {DISTRIBUTED}, which gathers them",
            (Alternative(DISTRIBUTED, [True]), without),
        )
    if precision.fp8_recipe == "mxfp8":
        yield Finding(
            "FP8 weights in MXFP8",
            PARAM_GATHER,
            "MXFP8 stores each weight twice, scaled along rows and along columns, and TE cannot place such a pair in "
            "the gather buffer (`replace_raw_data`)",
            (without, Alternative("precision.fp8_recipe", ["blockwise", "tensorwise", "delayed"])),
        )
    if any(precision.override_linear_precision):
        key = "precision.override_linear_precision"
        yield Finding(
            "FP8 weights with overrides",
            PARAM_GATHER,
            f"{key} makes GEMMs read BF16 weights, but weights would exist only in FP8",
            (without, Alternative(key, [[False] * 3])),
        )
    if not facts.config.model.fuse_qkv_params:
        key = "model.fuse_qkv_params"
        yield Finding(
            "FP8 weights in parts",
            PARAM_GATHER,
            f"{key}=false stores query, key and value weights separately, and TE does not concatenate FP8 weights",
            (Alternative(key, [True]), without),
        )
    # FusedAdam makes the masters itself then, and for delayed scaling from the weights as FP8 has rounded them; for
    # the other recipes Megatron gives it no shard of an FP8 weight unless the masters are FP32 and Megatron's.
    wrong = reduced if precision.fp8_recipe == "delayed" else [key for key in reduced if key == MAIN_PARAMS]
    for key in wrong:
        reason = (
            "with delayed scaling the master weights would start from FP8-rounded weights"
            if precision.fp8_recipe == "delayed"
            else f"with {precision.fp8_recipe} scaling Megatron Core supports only FP32 master weights of FP8 weights"
        )
        yield Finding(
            "optimizer format with FP8 weights",
            key,
            f"{PARAM_GATHER} keeps weights in FP8, and {reason}",
            (Alternative(key, ["fp32"]), without),
        )
