"""Owns what must hold between world size, parallel sizes, batch sizes and communication. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.facts import WORLD_SIZE, Alternative, Facts, Finding, divisors, multiples
from megatron_fp8.config.rules_model import PP, TP, VPP

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
        f"{facts.world_size} ranks do not divide into copies of the model: one copy takes {TP}={tp} times "
        f"{PP}={pp} = {facts.model_parallel_size} ranks",
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
            f"it divides the sequence over tensor-parallel ranks, and {TP}=1 has none to share it",
            (Alternative(key, [False]), Alternative(TP, [2, 4, 8], most=1)),
        )
    if parallel.virtual_pipeline_model_parallel_size is not None and parallel.pipeline_model_parallel_size == 1:
        yield Finding(
            "interleaved without stages",
            VPP,
            f"the interleaved schedule needs several pipeline stages, and {PP}=1",
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
                f"Megatron Core gathers parameters during the forward pass only with {needed}",
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
    shared = f"{MICRO_BATCH}={micro}" + ("" if facts.world_size is None else f" times data-parallel size {dp}")
    pp = parallel.pipeline_model_parallel_size
    interleaved = parallel.virtual_pipeline_model_parallel_size is not None and pp > 1
    step = group * (pp if interleaved else 1)
    alternatives = (
        Alternative(GLOBAL_BATCH, multiples(batch, step)),
        Alternative(MICRO_BATCH, divisors(batch, micro)),
    )
    if batch % group:
        yield Finding("batch arithmetic", GLOBAL_BATCH, f"the samples do not divide by {shared}", alternatives)
    elif interleaved and batch // group % pp:
        yield Finding(
            "interleaved micro-batches",
            GLOBAL_BATCH,
            f"it makes {batch // group} micro-batches of {shared}, and the interleaved schedule needs a "
            f"multiple of {PP}={pp}",
            (*alternatives, Alternative(VPP, [None])),
        )
