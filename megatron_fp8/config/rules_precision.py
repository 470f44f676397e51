"""Owns what FP8 asks of a config: shapes that the GEMMs accept, and amaxes reduced over the right ranks.

TE refuses an FP8 operand unless its last dimension is a multiple of 16 and the product of the others one of 8
(`assert_dim_for_fp8_exec`), and it says so in the middle of a step. A layer's operands are input `[tokens, in]`
and weight `[out, in]` in the forward pass, output gradient `[tokens, out]` and weight `[in, out]` in dgrad,
output gradient `[out, tokens]` and input `[in, tokens]` in wgrad (FP8 tensor cores read both operands along
the summed dimension). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.facts import Alternative, Facts, Finding, divisors, multiples
from megatron_fp8.config.layout import LayoutError, head_size, mlp_size, qkv_rows, query_groups
from megatron_fp8.config.rules_model import FFN, GROUPS, HEADS, HIDDEN, KV_CHANNELS, SEQ_LENGTH, TP
from megatron_fp8.config.rules_parallel import MICRO_BATCH

LAST = 16
OTHERS = 8
AMAX_REDUCTION = "precision.amax_reduction"
NOT_FP8 = Alternative("precision.mode", ["bf16"])


def check_precision(facts: Facts) -> Iterator[Finding]:
    """Every mistake of the FP8 recipe and of FP8's shapes; none unless precision.mode is fp8."""
    if facts.config.precision.mode != "fp8":
        return
    yield from _amax_reduction(facts)
    yield from _tokens(facts)
    yield from _hidden(facts)
    yield from _attention(facts)
    yield from _ffn(facts)


def _amax_reduction(facts: Facts) -> Iterator[Finding]:
    precision, parallel = facts.config.precision, facts.config.parallel
    tp = parallel.tensor_model_parallel_size
    if precision.amax_reduction == "data_parallel" and tp > 1:
        yield Finding(
            "amax group",
            AMAX_REDUCTION,
            f"with {TP}={tp} the ranks of a layer would scale differently although they share its tensors; "
            "runs diverge after about a thousand steps",
            (
                Alternative(AMAX_REDUCTION, ["auto", "tensor_and_data_parallel"]),
                Alternative(TP, [1]),
            ),
        )
    if precision.amax_reduction == "off" and parallel.sequence_parallel and tp > 1:
        yield Finding(
            "amax group off",
            AMAX_REDUCTION,
            "with parallel.sequence_parallel FP8 bytes are gathered from ranks with different scales and read "
            "with one of them",
            (Alternative(AMAX_REDUCTION, ["auto"]), Alternative("parallel.sequence_parallel", [False])),
        )


def _tokens(facts: Facts) -> Iterator[Finding]:
    config = facts.config
    seq_length, micro = config.model.seq_length, config.training.micro_batch_size
    num_tokens = seq_length * micro
    tp = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    alternatives = (
        Alternative(SEQ_LENGTH, multiples(seq_length, 2 * tp)),
        Alternative(MICRO_BATCH, multiples(micro)),
    )
    if num_tokens % LAST:
        yield Finding(
            "FP8 tokens",
            SEQ_LENGTH,
            f"FP8 needs a multiple of {LAST} tokens per micro-batch, the last dimension in wgrad, and "
            f"{MICRO_BATCH}={micro} makes {num_tokens}",
            (*alternatives, NOT_FP8),
        )
    elif num_tokens % tp == 0 and num_tokens // tp % OTHERS:
        yield Finding(
            "FP8 tokens per rank",
            SEQ_LENGTH,
            f"FP8 needs a multiple of {OTHERS} tokens per rank and micro-batch; with {MICRO_BATCH}={micro} and "
            f"parallel.sequence_parallel over {TP}={tp} there are {num_tokens // tp}",
            (*alternatives, Alternative("parallel.sequence_parallel", [False]), NOT_FP8),
        )


def _hidden(facts: Facts) -> Iterator[Finding]:
    hidden = facts.config.model.hidden_size
    if hidden % LAST:
        yield Finding(
            "FP8 hidden size",
            HIDDEN,
            f"FP8 needs a multiple of {LAST}: it is the last dimension of the qkv and fc1 inputs (fprop) and of "
            "the proj and fc2 output gradients (dgrad)",
            (Alternative(HIDDEN, multiples(hidden, LAST)), NOT_FP8),
        )


def _attention(facts: Facts) -> Iterator[Finding]:
    model, tp = facts.config.model, facts.config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, query_groups(model)
    try:
        size = head_size(model)
    except LayoutError:  # the rules of the model report what does not divide
        return
    if heads % tp or groups % tp:
        return
    proj_in, qkv_out = heads * size // tp, qkv_rows(model) // tp
    if qkv_out % LAST == 0 and proj_in % LAST == 0:
        return
    wrong = []
    if proj_in % LAST:
        wrong.append(f"proj input {heads} x {size} / {tp} = {proj_in} (fprop)")
    if qkv_out % LAST:
        wrong.append(f"qkv output ({heads} + 2 x {groups}) x {size} / {tp} = {qkv_out} (dgrad)")
    yield Finding(
        "FP8 attention",
        HEADS if model.kv_channels is None else KV_CHANNELS,
        f"FP8 needs multiples of {LAST} as last dimensions on each of {TP}={tp} ranks; "
        f"with head size {size} they are: {', '.join(wrong)}",
        (
            Alternative(KV_CHANNELS, multiples(size, 2)),
            Alternative(HEADS, multiples(heads, tp)),
            *([Alternative(GROUPS, divisors(heads, groups))] if model.num_query_groups else []),
            Alternative(TP, divisors(heads, tp)),
            NOT_FP8,
        ),
    )


def _ffn(facts: Facts) -> Iterator[Finding]:
    ffn, tp = mlp_size(facts.config.model), facts.config.parallel.tensor_model_parallel_size
    # fc1 has as many rows or twice as many: its own rule holds when fc2's does.
    if ffn % tp or ffn // tp % LAST == 0:
        return
    yield Finding(
        "FP8 FFN",
        FFN,
        f"FP8 needs a multiple of {LAST} inner features on each of {TP}={tp} ranks, and there are {ffn // tp}: the "
        "last dimension of the fc2 input (fprop) and, with fc1's rows, of its output gradient (dgrad)",
        (
            Alternative(FFN, multiples(ffn, LAST * tp)),
            Alternative(TP, divisors(ffn, tp)),
            NOT_FP8,
        ),
        value=ffn,
    )
