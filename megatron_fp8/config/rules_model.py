"""Rules for the sizes of the model and the parallel sizes that share them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.facts import Alternative, Facts, Finding, divisors, multiples
from megatron_fp8.config.layout import LayoutError, mlp_size, query_groups, rotary_dim

TP = "parallel.tensor_model_parallel_size"
PP = "parallel.pipeline_model_parallel_size"
VPP = "parallel.virtual_pipeline_model_parallel_size"
HEADS = "model.num_attention_heads"
GROUPS = "model.num_query_groups"
HIDDEN = "model.hidden_size"
KV_CHANNELS = "model.kv_channels"
FFN = "model.ffn_hidden_size"
LAYERS = "model.num_layers"
SEQ_LENGTH = "model.seq_length"


def check_model(facts: Facts) -> Iterator[Finding]:
    """Every mistake among heads, groups, MLP, layers, sequence, positions and vocabulary."""
    yield from _heads(facts)
    yield from _mlp(facts)
    yield from _layers(facts)
    yield from _sequence(facts)
    yield from _positions(facts)
    yield from _recompute(facts)
    yield from _vocabulary(facts)


def _heads(facts: Facts) -> Iterator[Finding]:
    model, tp = facts.config.model, facts.config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, query_groups(model)
    if model.kv_channels is None and model.hidden_size % heads:
        yield Finding(
            "head size",
            HIDDEN,
            f"not divisible by model.num_attention_heads={heads}, and model.kv_channels is not set",
            (
                Alternative(HIDDEN, multiples(model.hidden_size, heads)),
                Alternative(HEADS, divisors(model.hidden_size, heads)),
            ),
        )
    if heads % groups:
        yield Finding(
            "query groups",
            GROUPS,
            f"model.num_attention_heads={heads} is not divisible by it; each group must serve the same number of heads",
            (Alternative(GROUPS, divisors(heads, groups)), Alternative(HEADS, multiples(heads, groups))),
        )
    if heads % tp:
        yield Finding(
            "heads by TP",
            HEADS,
            f"not divisible by {TP}={tp}; each rank must hold the same number of heads",
            (Alternative(HEADS, multiples(heads, tp)), Alternative(TP, divisors(heads, tp))),
        )
    if model.num_query_groups is not None and groups % tp:
        yield Finding(
            "groups by TP",
            GROUPS,
            f"not divisible by {TP}={tp}; each rank must hold the same number of query groups",
            (Alternative(GROUPS, multiples(groups, tp)), Alternative(TP, divisors(groups, tp))),
        )


def _mlp(facts: Facts) -> Iterator[Finding]:
    model, tp = facts.config.model, facts.config.parallel.tensor_model_parallel_size
    ffn = mlp_size(model)
    if ffn % tp:
        yield Finding(
            "FFN by TP",
            FFN,
            f"not divisible by {TP}={tp}; each rank must hold the same number of the MLP's inner features",
            (Alternative(FFN, multiples(ffn, tp)), Alternative(TP, divisors(ffn, tp))),
            value=ffn,
        )


def _layers(facts: Facts) -> Iterator[Finding]:
    parallel, layers = facts.config.parallel, facts.config.model.num_layers
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    chunks = pp * (vpp or 1)
    if layers % chunks:
        shared = f"{PP}={pp}" + (f" times {VPP}={vpp}" if vpp else "")
        yield Finding(
            "layers by stages",
            LAYERS,
            f"not divisible by {shared}; each chunk of a pipeline stage must hold the same number of layers",
            (
                Alternative(LAYERS, multiples(layers, chunks)),
                Alternative(PP, divisors(layers, pp)),
                *([Alternative(VPP, [None, *divisors(layers, vpp)])] if vpp else []),
            ),
        )


def _sequence(facts: Facts) -> Iterator[Finding]:
    config = facts.config
    tp = config.parallel.tensor_model_parallel_size
    if config.parallel.sequence_parallel and config.model.seq_length % tp:
        yield Finding(
            "sequence by TP",
            SEQ_LENGTH,
            f"not divisible by {TP}={tp}, which parallel.sequence_parallel requires",
            (
                Alternative(SEQ_LENGTH, multiples(config.model.seq_length, tp)),
                Alternative(TP, divisors(config.model.seq_length, tp)),
                Alternative("parallel.sequence_parallel", [False]),
            ),
        )


def _positions(facts: Facts) -> Iterator[Finding]:
    model = facts.config.model
    if model.position_embedding_type == "learned_absolute":
        rows = model.max_position_embeddings
        if rows is not None and rows < model.seq_length:
            yield Finding(
                "positions",
                "model.max_position_embeddings",
                f"the position table is shorter than model.seq_length={model.seq_length}",
                (
                    Alternative("model.max_position_embeddings", [model.seq_length]),
                    Alternative(SEQ_LENGTH, [rows, *multiples(rows, 128)]),
                ),
            )
        return
    try:
        rotated = rotary_dim(model)
    except LayoutError:  # reported as "head size"
        return
    if rotated % 2 or rotated < 2:
        share = f" x model.rotary_percent={model.rotary_percent:g}" if model.rotary_percent < 1 else ""
        key = HIDDEN if model.kv_channels is None else KV_CHANNELS
        heads = model.num_attention_heads
        size = model.hidden_size // heads if model.kv_channels is None else model.kv_channels
        step = 2 * heads if key == HIDDEN else 2
        yield Finding(
            "RoPE pairs",
            key,
            f"RoPE rotates pairs of features and needs an even number of them; head size {size}{share} gives {rotated}",
            (
                Alternative(key, multiples(facts.get(key), step)),
                *([Alternative(KV_CHANNELS, multiples(size, 2))] if key == HIDDEN else []),
                *([Alternative("model.rotary_percent", [1.0])] if share else []),
            ),
        )


def _recompute(facts: Facts) -> Iterator[Finding]:
    config = facts.config
    layers = config.model.recompute_num_layers
    parallel = config.parallel
    chunks = parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)
    per_chunk = -(-config.model.num_layers // chunks)
    if config.model.recompute_granularity == "full" and layers is not None and layers > per_chunk:
        yield Finding(
            "recomputed layers",
            "model.recompute_num_layers",
            f"each chunk of a pipeline stage has only {per_chunk} layers",
            (Alternative("model.recompute_num_layers", [per_chunk, None]),),
        )


def _vocabulary(facts: Facts) -> Iterator[Finding]:
    size = facts.config.model.vocab_size
    if size is not None and facts.vocab_size is not None and size < facts.vocab_size:
        yield Finding(
            "vocabulary",
            "model.vocab_size",
            f"smaller than the tokenizer's vocabulary of {facts.vocab_size} tokens",
            (Alternative("model.vocab_size", [facts.vocab_size, None]),),
        )
