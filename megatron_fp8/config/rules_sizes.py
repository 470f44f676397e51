"""Owns the products of several keys that must stay within what is counted, indexed or multiplied. Imports no torch.

Each key's own range is in the schema; these are what keys within their ranges can make together.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.facts import Alternative, Facts, Finding
from megatron_fp8.config.layout import LayoutError, block_gemms, pad_vocab_size
from megatron_fp8.config.limits import FP32_SMALLEST_NORMAL, MOST_SAMPLES, MOST_SIZE, MOST_TOKENS
from megatron_fp8.config.rules_model import HEADS, HIDDEN, SEQ_LENGTH, TP
from megatron_fp8.config.rules_parallel import GLOBAL_BATCH, MICRO_BATCH

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
    if tokens > MOST_SIZE:
        yield Finding(
            "tokens of a micro-batch",
            SEQ_LENGTH,
            f"with {MICRO_BATCH}={micro} a micro-batch has {tokens:,} tokens, more than {MOST_SIZE:,}: {MOST_SIZE.why}",
            (Alternative(MICRO_BATCH, [max(MOST_SIZE // model.seq_length, 1), 1]), Alternative(SEQ_LENGTH, [4096])),
        )
    try:
        gemms = block_gemms(facts.config)
    except LayoutError:  # the rules of the model report what does not divide
        return
    for gemm in gemms:
        features = max(gemm.in_features, gemm.out_features)
        if features > MOST_SIZE:
            key = HEADS if gemm.name in ("qkv", "proj") else HIDDEN
            reason = f"on each of {TP}={facts.get(TP)} ranks a side of {gemm.name}'s weight has {features:,} features"
            reason = f"{reason}, more than {MOST_SIZE:,}: {MOST_SIZE.why}"
            yield Finding(f"features of {gemm.name}", key, reason, otherwise="fewer features, or more ranks for each")


def _vocabulary(facts: Facts) -> Iterator[Finding]:
    model, tp = facts.config.model, facts.config.parallel.tensor_model_parallel_size
    padded = pad_vocab_size(model.vocab_size or facts.vocab_size or 1, model.make_vocab_size_divisible_by, tp)
    if padded > MOST_SIZE:
        key = "model.make_vocab_size_divisible_by"
        reason = f"with {TP}={tp} the vocabulary is padded to {padded:,} tokens, more than {MOST_SIZE:,}"
        yield Finding("padded vocabulary", key, f"{reason}: {MOST_SIZE.why}", (Alternative(key, [128, 1], most=1),))


def _samples(facts: Facts) -> Iterator[Finding]:
    """What a run and its evaluations read."""
    training, batch = facts.config.training, facts.config.training.global_batch_size
    reads = {"training.train_iters": training.train_iters}
    if not training.full_validation:
        reads["training.eval_iters"] = training.eval_iters
    most = min(MOST_SAMPLES, MOST_TOKENS // facts.config.model.seq_length)
    for key, steps in reads.items():
        if steps * batch > most:
            reason = f"{steps:,} times {GLOBAL_BATCH}={batch:,} are more than {most:,} samples: {MOST_SAMPLES.why}"
            yield Finding(f"samples of {key}", key, reason, (Alternative(key, [most // batch]),))


def _decay(facts: Facts) -> Iterator[Finding]:
    """A step multiplies weights by 1 - lr x weight_decay."""
    optimizer = facts.config.optimizer
    if optimizer.lr * optimizer.weight_decay >= 1:
        product = optimizer.lr * optimizer.weight_decay
        reason = f"with {LR}={optimizer.lr:g} a step multiplies weights by 1 - {product:g}, which turns their signs"
        yield Finding("decay of a step", DECAY, reason, (Alternative(DECAY, [0.1, 0.0], most=1),))


def _clipping(facts: Facts) -> Iterator[Finding]:
    """0 switches it off; what is nearly 0 makes all gradients 0."""
    clip = facts.config.optimizer.clip_grad
    if 0 < clip < FP32_SMALLEST_NORMAL:
        reason = f"gradients are multiplied with it, and {FP32_SMALLEST_NORMAL.why}"
        yield Finding("tiny clipping", CLIP, reason, (Alternative(CLIP, [1.0, 0.0]),))
