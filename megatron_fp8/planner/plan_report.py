"""Words a plan: as tables, every number with its unit, and as JSON. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_fp8.config.attention import Cause, in_documents, kept_score_bytes, unfused_attention
from megatron_fp8.config.config_warnings import config_warnings
from megatron_fp8.config.load import LoadedConfig
from megatron_fp8.config.problem import Problem
from megatron_fp8.planner.communication import Traffic
from megatron_fp8.planner.flops import Fp8Gain
from megatron_fp8.planner.gpus import DEFAULT_GPU, GPUS
from megatron_fp8.planner.memory import MemoryKind
from megatron_fp8.planner.plan import DataCheck, Plan, make_plan, resolve_layout, resolve_sizes
from megatron_fp8.precision.chart_labels import row_format, row_label

WIDTH_CHARS = 120
_MAX_STAGES = 8
_FLOPS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))
MEMORY_LABELS = {kind: kind.value for kind in MemoryKind} | {MemoryKind.MASTER_WEIGHTS: "master weights"}


def describe_plan(loaded: LoadedConfig, world_size: int | None, check_data: DataCheck) -> tuple[str, list[Problem]]:
    """The plan as text, on the default GPU, and warnings about the config. Raises ConfigError with every mistake."""
    loaded, vocab_size = resolve_sizes(loaded, check_data)
    layout = resolve_layout(loaded, world_size, vocab_size)
    return plan_text(make_plan(loaded.config, layout, GPUS[DEFAULT_GPU])), config_warnings(loaded, layout)


def plan_text(plan: Plan) -> str:
    """The plan as plain text."""
    console = Console(width=WIDTH_CHARS, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(plan_tables(plan))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def plan_tables(plan: Plan) -> Group:
    """The plan as tables."""
    return Group(
        Text(_headline(plan), style="bold"),
        _parameters(plan),
        _memory(plan),
        _flops(plan),
        _messages(plan),
        *(Text(line) for line in _notes(plan)),
    )


def table(title: str, *columns: str) -> Table:
    """An empty table whose columns after the first hold numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", overflow="fold")
    return made


def _headline(plan: Plan) -> str:
    layout = plan.layout
    chunks = f" x {layout.num_chunks} chunks" if layout.num_chunks > 1 else ""
    return (
        f"{plan.config.run.name} on {layout.world_size} x {plan.gpu.title}: TP {layout.tensor_model_parallel_size} x "
        f"PP {layout.pipeline_model_parallel_size}{chunks} x DP {layout.data_parallel_size}, "
        f"{layout.num_microbatches} micro-batches of {layout.tokens_per_microbatch:,} tokens per step"
    )


def _parameters(plan: Plan) -> RenderableType:
    made = table("parameters", "part", "parameters")
    counts = plan.parameters
    made.add_row("whole model", f"{counts.total:,}")
    if counts.without_padding != counts.total:
        made.add_row("  without vocabulary padding", f"{counts.without_padding:,}")
    made.add_row("  word embedding", f"{counts.word_embedding:,}")
    if counts.position_embedding:
        made.add_row("  position embedding", f"{counts.position_embedding:,}")
    made.add_row("  each layer", f"{counts.per_layer:,}")
    made.add_row("  final norm", f"{counts.final_norm:,}")
    made.add_row("  head", f"{counts.head:,}" if counts.head else "tied to the word embedding")
    made.add_row("per rank, at most", f"{max(rank.total for rank in plan.rank_parameters):,}")
    return made


def _memory(plan: Plan) -> RenderableType:
    """By stage: all if they are few, else the first, the fullest and the last."""
    memories = plan.memories
    few = len(memories) <= _MAX_STAGES
    shown = memories if few else [memories[i] for i in sorted({0, plan.fullest.stage, len(memories) - 1})]
    made = table("memory per rank", "kind", *(f"stage {memory.stage}" for memory in shown))
    for kind in MemoryKind:
        if any(memory.by_kind[kind] for memory in memories):
            made.add_row(MEMORY_LABELS[kind], *(in_bytes(memory.by_kind[kind]) for memory in shown))
    made.add_row("total", *(in_bytes(memory.total) for memory in shown), style="bold")
    return made


def _flops(plan: Plan) -> RenderableType:
    flops = plan.flops
    made = table("floating-point operations", "per token", "FLOPs")
    for name, value in (
        ("forward", flops.forward),
        ("  linear layers", flops.linear),
        ("  attention, causal", flops.attention),
        ("  head", flops.head),
        ("backward", flops.backward),
        ("model: what MFU counts", flops.model),
        ("  if attention were not causal", flops.model_with_all_keys),
        ("recomputed layers", flops.recompute),
        ("attention scores recomputed in fused kernels", flops.scores_again),
        ("hardware: all that is computed", flops.hardware),
    ):
        made.add_row(name, _in_unit(value, _FLOPS, "FLOP"))
    return made


def _messages(plan: Plan) -> RenderableType:
    """Of the stage that sends most."""
    stage = max(range(len(plan.traffic)), key=lambda index: sum(item.sent_bytes for item in plan.traffic[index]))
    made = table(f"communication per step, stage {stage}", "what", "format", "ranks", "tensors", "sent per rank")
    for item in plan.traffic[stage]:
        sizes = in_bytes(item.row.size), in_bytes(item.sent_bytes)
        made.add_row(row_label(item.row), row_format(item.row), str(item.num_ranks), *sizes)
    return made if plan.traffic[stage] else Text("no communication: there is one rank")


def _notes(plan: Plan) -> Iterator[str]:
    memory, total = plan.gpu.memory_bytes, plan.fullest.total
    if memory is None:
        yield f"{plan.gpu.title}: device memory is not modelled"
    else:
        fits = "fits" if total <= 0.9 * memory else "tight: CUDA, NCCL and fragmentation take some too"
        yield (
            f"fullest rank: {in_bytes(total)} (stage {plan.fullest.stage}), {in_percent(total / memory)} of "
            f"{memory / 1e9:.0f} GB: {'does not fit' if total > memory else fits}"
        )
    bubble = plan.bubble_share
    yield f"pipeline bubble: {in_percent(bubble)} of forward and backward time" if bubble else "no pipeline bubble"
    yield from _duration(plan)
    if plan.fp8 is not None:
        yield from _fp8_gain(plan, plan.fp8)
    yield from _determinism(plan)


def _duration(plan: Plan) -> Iterator[str]:
    spent = plan.duration
    budget = _in_unit(spent.num_tokens, ((1e12, "trillion tokens"), (1e9, "billion tokens")), "tokens")
    if spent.days is None or spent.gpu_hours is None:
        yield f"days for {budget}: withheld; {spent.withheld}"
        return
    hours = f"{spent.gpu_hours:,.0f}" if spent.gpu_hours >= 10 else f"{spent.gpu_hours:.3g}"
    of_fp8 = "" if spent.share_of_fp8_peak is None else f", {in_percent(spent.share_of_fp8_peak)} of the FP8 peak"
    yield (f"{budget}: {_in_days(spent.days)}, {hours} GPU-hours, at an assumed MFU of {in_percent(spent.mfu)}")
    yield (
        f"  that is {spent.tflops_per_gpu:,.0f} of {plan.gpu.peaks_tflops['bf16']:,.0f} dense BF16 TFLOP/s per GPU"
        f"{of_fp8}; {spent.tokens_per_second:,.0f} tokens/s in total"
    )


def _fp8_gain(plan: Plan, gain: Fp8Gain) -> Iterator[str]:
    yield (
        f"FP8 {'pays' if gain.saved_us > gain.spent_us else 'does not pay'}: estimated for an H100, a layer's GEMMs "
        f"save {gain.saved_us:,.0f} us per micro-batch and its casts take {gain.spent_us:,.0f} us"
    )
    if gain.pays_from_tokens is None:
        yield "  at these widths per rank it never pays, at any number of tokens per micro-batch"
    else:
        tokens = plan.layout.tokens_per_microbatch
        yield f"  at these widths it pays from {gain.pays_from_tokens:,} tokens per micro-batch; there are {tokens:,}"
    if plan.bytes_in_bf16 is not None:
        in_bf16, in_fp8 = in_bytes(plan.bytes_in_bf16), in_bytes(plan.fullest.total)
        yield f"  the fullest rank would hold {in_bf16} in BF16; in FP8 it holds {in_fp8}"


def _determinism(plan: Plan) -> Iterator[str]:
    """What `training.deterministic_mode` changes on a GPU; its cost was not measured, so no number is given."""
    config, layout, gpu = plan.config, plan.layout, plan.gpu
    if not config.training.deterministic_mode:
        return
    if gpu.board is None:
        yield "deterministic: every CPU run is; what the key changes costs little there"
        return
    yield (
        "deterministic: no atomic additions in the backward passes of attention and embeddings, NCCL's ring algorithm "
        "only (no trees, no in-network reduction), uninitialized memory filled"
    )
    yield "  all of these cost time, which was not measured and is in no number above"
    unfused = unfused_attention(config, layout, gpu.attention)
    if unfused is None or unfused.cause is not Cause.DETERMINISM:
        return
    if not gpu.attention.deterministic:
        lost = f"cuDNN has no deterministic backward pass for attention on the {gpu.title}"
    else:
        lost = "cuDNN's deterministic backward pass with masking between documents would not fit"
        lost += "" if unfused.is_certain else f" with more than {in_documents(unfused.beyond)} in a micro-batch"
    yield f"  {lost}: Transformer Engine's attention is then unfused"
    kept = in_bytes(kept_score_bytes(config, layout, documents=unfused.beyond + 1))
    counts = "counts" if unfused.is_certain else "does not count"
    kept = f"at least {kept}" if config.data.reset_attention_mask else kept
    yield f"  and keeps {kept} of scores per layer and micro-batch, which the memory above {counts}"


def plan_json(plan: Plan) -> dict[str, Any]:
    """Plain data; bytes, FLOPs per token, seconds, shares between 0 and 1."""
    layout, flops = plan.layout, plan.flops
    computed = ("forward", "backward", "model", "hardware", "model_with_all_keys")
    return {
        "name": plan.config.run.name,
        "gpu": plan.gpu.name,
        "world_size": layout.world_size,
        "layout": {
            "tensor_model_parallel_size": layout.tensor_model_parallel_size,
            "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
            "chunks_per_stage": layout.num_chunks,
            "data_parallel_size": layout.data_parallel_size,
            "micro_batches": layout.num_microbatches,
            "tokens_per_step": layout.tokens_per_global_batch,
        },
        "parameters": asdict(plan.parameters),
        "parameters_per_rank": [rank.total for rank in plan.rank_parameters],
        "memory_bytes": [
            {**{kind.value: size for kind, size in memory.by_kind.items()}, "total": memory.total}
            for memory in plan.memories
        ],
        "flops_per_token": {**asdict(flops), **{name: getattr(flops, name) for name in computed}},
        "bubble_share": plan.bubble_share,
        "messages_per_step": [[_message_json(item) for item in stage] for stage in plan.traffic],
        "duration": asdict(plan.duration),
        "fp8": None if plan.fp8 is None else asdict(plan.fp8),
        "memory_bytes_in_bf16": plan.bytes_in_bf16,
        "deterministic": list(_determinism(plan)),
    }


def _message_json(item: Traffic) -> dict[str, Any]:
    return {
        "name": row_label(item.row),
        "group": None if item.row.group is None else item.row.group.value,
        "format": row_format(item.row),
        "num_ranks": item.num_ranks,
        "tensor_bytes": item.row.size,
        "sent_bytes": item.sent_bytes,
        "waits": item.waits,
    }


def in_bytes(size: float) -> str:
    """Bytes in the largest binary unit that makes at least 1: 1.50 GiB, 12.0 KiB."""
    if size >= 2**30:
        return f"{size / 2**30:,.2f} GiB"
    return _in_unit(size, ((2**20, "MiB"), (2**10, "KiB")), "B", digits=1)


def in_percent(share: float) -> str:
    """A share of one."""
    return f"{100 * share:.1f} %"


def _in_unit(value: float, units: Sequence[tuple[float, str]], smallest: str, digits: int = 2) -> str:
    """A number in the first of the units that makes at least 1: 48.20 GFLOP, 15,000,000 tokens."""
    for unit, name in units:
        if value >= unit:
            return f"{value / unit:,.{digits}f} {name}"
    return f"{value:,.0f} {smallest}"


def _in_days(days: float) -> str:
    """Days, or the largest smaller unit that makes at least 2."""
    for unit, name in ((1, "days"), (24, "hours"), (24 * 60, "minutes")):
        if days * unit >= 2:
            return f"{days * unit:,.1f} {name}"
    return f"{days * 86400:.2f} seconds"
