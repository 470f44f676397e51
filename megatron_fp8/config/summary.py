"""Owns what `--check` says about a config that can run: layout, batch, size, in a few lines. Imports no torch."""

from __future__ import annotations

from megatron_fp8.config.check import fitting_world_sizes
from megatron_fp8.config.formats import describe_formats
from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config

_MOST_WORLD_SIZES_SHOWN = 16


def summarize(config: Config, layout: Layout) -> str:
    """What would run on `layout`, for a person."""
    model, parallel = config.model, config.parallel
    chunks = f", {layout.num_chunks} chunks a stage" if layout.num_chunks > 1 else ""
    sequence = ", sequence parallel" if parallel.sequence_parallel else ""
    optimizer = "distributed optimizer" if parallel.use_distributed_optimizer else "replicated optimizer"
    tokens = layout.tokens_per_global_batch
    return "\n".join(
        [
            f"{config.run.name}: can run on {layout.world_size} ranks",
            f"  model      {model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads, "
            f"{layout.num_query_groups} query groups, FFN {layout.ffn_hidden_size}, "
            f"vocabulary {layout.vocab_size:,} padded to {layout.padded_vocab_size:,}: "
            f"{layout.num_parameters:,} parameters",
            f"  precision  {describe_formats(config.precision, model.num_layers)}",
            f"  layout     TP {layout.tensor_model_parallel_size} x PP {layout.pipeline_model_parallel_size} x "
            f"DP {layout.data_parallel_size}{chunks}{sequence}, {optimizer}; "
            f"{layout.layers_per_stage} layers a stage",
            f"  batch      {layout.global_batch_size} samples = {layout.micro_batch_size} x DP "
            f"{layout.data_parallel_size} x {layout.num_microbatches} micro-batches; {tokens:,} tokens a step",
            f"  length     {config.training.train_iters:,} steps, {tokens * config.training.train_iters:,} tokens",
        ]
    )


def describe_world_sizes(config: Config) -> str:
    """Which world sizes the config fits, for a person who has not said how many ranks there will be."""
    sizes = fitting_world_sizes(config)
    if not sizes:
        return f"{config.run.name}: no world size fits"
    shown = ", ".join(str(size) for size in sizes[:_MOST_WORLD_SIZES_SHOWN])
    more = f", ... ({len(sizes)} in all)" if len(sizes) > _MOST_WORLD_SIZES_SHOWN else ""
    return f"{config.run.name}: can run on {shown}{more} ranks; --world-size N says how"
