"""Rules between world size, parallel sizes, batch sizes, communication and the products of sizes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.facts import WORLD_SIZE, Alternative, Facts, Finding, divisors, multiples
from megatron_fp8.config.layout import LayoutError, block_gemms, pad_vocab_size
from megatron_fp8.config.limits import FP32_SMALLEST_NORMAL, MAX_SAMPLES, MAX_SIZE, MAX_TOKENS
from megatron_fp8.config.rules_model import HEADS, HIDDEN, PP, SEQ_LENGTH, TP, VPP

GLOBAL_BATCH = "training.global_batch_size"
MICRO_BATCH = "training.micro_batch_size"


def check_parallel(facts: Facts) -> Iterator[Finding]:
    """Every mistake of world size, schedule, batch arithmetic and overlapping."""
    yield from _world_size(facts)
    yield from _switches(facts)
    yield from _batch(facts)


def _world_size(facts: Facts) -> Iterator[Finding]:
    if facts.world_size is None or facts.world_size % facts.model_parallel_size == 0:
        return
    parallel = facts.config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    yield Finding(
        "world size",
        WORLD_SIZE,
        f"not divisible by the ranks of one model replica, {TP}={tp} x {PP}={pp} = {facts.model_parallel_size}",
        (
            Alternative(WORLD_SIZE, multiples(facts.world_size, facts.model_parallel_size)),
            Alternative(TP, divisors(facts.world_size, tp)),
            Alternative(PP, divisors(facts.world_size, pp)),
        ),
    )


def _switches(facts: Facts) -> Iterator[Finding]:
    parallel = facts.config.parallel
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        key = "parallel.sequence_parallel"
        yield Finding(
            "sequence parallel",
            key,
            f"sequence parallelism shards the sequence over the tensor-parallel ranks and needs more than {TP}=1",
            (Alternative(key, [False]), Alternative(TP, [2, 4, 8], most=1)),
        )
    if parallel.virtual_pipeline_model_parallel_size is not None and parallel.pipeline_model_parallel_size == 1:
        yield Finding(
            "interleaved without stages",
            VPP,
            f"the interleaved schedule needs at least two pipeline stages, and {PP}=1",
            (Alternative(VPP, [None]), Alternative(PP, [2, 4, 8], most=1)),
        )
    key = "parallel.overlap_param_gather"
    for rule, needed in (
        ("gather overlap without shards", "parallel.use_distributed_optimizer"),
        ("gather overlap alone", "parallel.overlap_grad_reduce"),
    ):
        if parallel.overlap_param_gather and not facts.get(needed):
            yield Finding(
                rule,
                key,
                f"Megatron Core can only overlap the parameter all-gather with {needed}=true",
                (Alternative(needed, [True]), Alternative(key, [False])),
            )


def _batch(facts: Facts) -> Iterator[Finding]:
    """Batch arithmetic: global batch = micro-batch x data-parallel size x number of micro-batches.

    Without a world size the data-parallel size counts as 1: what fails then fails with any.
    """
    training, parallel = facts.config.training, facts.config.parallel
    batch, micro = training.global_batch_size, training.micro_batch_size
    dp = 1 if facts.world_size is None else facts.data_parallel_size
    if dp is None:  # reported as "world size"
        return
    group = micro * dp
    shared = f"{MICRO_BATCH}={micro}" + ("" if facts.world_size is None else f" x data-parallel size {dp}")
    pp = parallel.pipeline_model_parallel_size
    interleaved = parallel.virtual_pipeline_model_parallel_size is not None and pp > 1
    step = group * (pp if interleaved else 1)
    alternatives = (
        Alternative(GLOBAL_BATCH, multiples(batch, step)),
        Alternative(MICRO_BATCH, divisors(batch, micro)),
    )
    if batch % group:
        yield Finding("batch arithmetic", GLOBAL_BATCH, f"not divisible by {shared}", alternatives)
    elif interleaved and batch // group % pp:
        yield Finding(
            "interleaved micro-batches",
            GLOBAL_BATCH,
            f"gives {batch // group} micro-batches of {shared}; the interleaved schedule needs a multiple of {PP}={pp}",
            (*alternatives, Alternative(VPP, [None])),
        )


VOCAB_SIZE = "model.vocab_size"
DECAY, LR, CLIP = "optimizer.weight_decay", "optimizer.lr", "optimizer.clip_grad"


def check_sizes(facts: Facts) -> Iterator[Finding]:
    """Every product that is too large."""
    yield from _gemms(facts)
    yield from _vocabulary(facts)
    yield from _samples(facts)
    yield from _decay(facts)
    yield from _clipping(facts)


def _gemms(facts: Facts) -> Iterator[Finding]:
    model, micro = facts.config.model, facts.config.training.micro_batch_size
    tokens = model.seq_length * micro
    if tokens > MAX_SIZE:
        yield Finding(
            "tokens of a micro-batch",
            SEQ_LENGTH,
            f"with {MICRO_BATCH}={micro} a micro-batch has {tokens:,} tokens, more than {MAX_SIZE:,}: {MAX_SIZE.why}",
            (Alternative(MICRO_BATCH, [max(MAX_SIZE // model.seq_length, 1), 1]), Alternative(SEQ_LENGTH, [4096])),
        )
    try:
        gemms = block_gemms(facts.config)
    except LayoutError:  # the rules of the model report what does not divide
        return
    for gemm in gemms:
        features = max(gemm.in_features, gemm.out_features)
        if features > MAX_SIZE:
            key = HEADS if gemm.name in ("qkv", "proj") else HIDDEN
            reason = f"on each of {TP}={facts.get(TP)} ranks a side of {gemm.name}'s weight has {features:,} features"
            reason = f"{reason}, more than {MAX_SIZE:,}: {MAX_SIZE.why}"
            yield Finding(
                f"features of {gemm.name}", key, reason, otherwise="fewer features, or more tensor-parallel ranks"
            )


def _vocabulary(facts: Facts) -> Iterator[Finding]:
    model, tp = facts.config.model, facts.config.parallel.tensor_model_parallel_size
    padded = pad_vocab_size(model.vocab_size or facts.vocab_size or 1, model.make_vocab_size_divisible_by, tp)
    if padded > MAX_SIZE:
        key = "model.make_vocab_size_divisible_by"
        reason = f"with {TP}={tp} the vocabulary is padded to {padded:,} tokens, more than {MAX_SIZE:,}"
        yield Finding("padded vocabulary", key, f"{reason}: {MAX_SIZE.why}", (Alternative(key, [128, 1], most=1),))


def _samples(facts: Facts) -> Iterator[Finding]:
    """What a run and its evaluations read."""
    training, batch = facts.config.training, facts.config.training.global_batch_size
    reads = {"training.train_iters": training.train_iters}
    if not training.full_validation:
        reads["training.eval_iters"] = training.eval_iters
    most = min(MAX_SAMPLES, MAX_TOKENS // facts.config.model.seq_length)
    for key, steps in reads.items():
        if steps * batch > most:
            reason = f"{steps:,} x {GLOBAL_BATCH}={batch:,} exceeds {most:,} samples: {MAX_SAMPLES.why}"
            yield Finding(f"samples of {key}", key, reason, (Alternative(key, [most // batch]),))


def _decay(facts: Facts) -> Iterator[Finding]:
    """A step multiplies weights by 1 - lr x weight_decay."""
    optimizer = facts.config.optimizer
    if optimizer.lr * optimizer.weight_decay >= 1:
        product = optimizer.lr * optimizer.weight_decay
        reason = (
            f"with {LR}={optimizer.lr:g} each step multiplies the weights by 1 - {product:g}, which flips their signs"
        )
        yield Finding("decay of a step", DECAY, reason, (Alternative(DECAY, [0.1, 0.0], most=1),))


def _clipping(facts: Facts) -> Iterator[Finding]:
    """0 switches it off; what is nearly 0 makes all gradients 0."""
    clip = facts.config.optimizer.clip_grad
    if 0 < clip < FP32_SMALLEST_NORMAL:
        reason = f"gradients are multiplied by it, and {FP32_SMALLEST_NORMAL.why}"
        yield Finding("tiny clipping", CLIP, reason, (Alternative(CLIP, [1.0, 0.0]),))
