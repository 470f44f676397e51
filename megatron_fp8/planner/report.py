"""Owns the plan and the search as a person reads them: tables, every number with its unit. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_fp8.planner.memory import MemoryKind, StageMemory
from megatron_fp8.planner.plan import Plan, traffic_format, traffic_label
from megatron_fp8.planner.units import in_bytes, in_days, in_flops, in_gpu_hours, in_percent, in_tokens

WIDTH_CHARS = 120
_MOST_STAGES = 8
MEMORY_LABELS = {kind: kind.value for kind in MemoryKind} | {MemoryKind.MASTER_WEIGHTS: "master weights"}


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
        f"{plan.name} on {layout.world_size} x {plan.gpu.title}: TP {layout.tensor_model_parallel_size} x "
        f"PP {layout.pipeline_model_parallel_size}{chunks} x DP {layout.data_parallel_size}, "
        f"{layout.num_microbatches} micro-batches of {layout.tokens_per_microbatch:,} tokens a step"
    )


def _parameters(plan: Plan) -> RenderableType:
    made = table("parameters", "part", "parameters")
    counts = plan.parameters
    made.add_row("whole model", f"{counts.total:,}")
    if counts.without_padding != counts.total:
        made.add_row("  without the rows that pad the vocabulary", f"{counts.without_padding:,}")
    made.add_row("  word embedding", f"{counts.word_embedding:,}")
    if counts.position_embedding:
        made.add_row("  position embedding", f"{counts.position_embedding:,}")
    made.add_row("  each layer", f"{counts.per_layer:,}")
    made.add_row("  final norm", f"{counts.final_norm:,}")
    made.add_row("  head", f"{counts.head:,}" if counts.head else "the word embedding's")
    ranks = [rank.total for rank in plan.rank_parameters]
    made.add_row("a rank, at most", f"{max(ranks):,}")
    return made


def _memory(plan: Plan) -> RenderableType:
    """By stage: all where they are few, else the first, the fullest and the last."""
    memories = plan.memories
    shown = memories if len(memories) <= _MOST_STAGES else _ends_and(plan.fullest, memories)
    made = table("memory of a rank", "kind", *(f"stage {memory.stage}" for memory in shown))
    for kind in MemoryKind:
        if any(memory.by_kind[kind] for memory in memories):
            made.add_row(MEMORY_LABELS[kind], *(in_bytes(memory.by_kind[kind]) for memory in shown))
    made.add_row("total", *(in_bytes(memory.total) for memory in shown), style="bold")
    return made


def _ends_and(fullest: StageMemory, memories: list[StageMemory]) -> list[StageMemory]:
    stages = sorted({0, fullest.stage, len(memories) - 1})
    return [memories[stage] for stage in stages]


def _flops(plan: Plan) -> RenderableType:
    flops = plan.flops
    made = table("floating-point operations", "of a token", "FLOPs")
    for name, value in (
        ("forward", flops.forward),
        ("  layers' matrix products", flops.linear),
        ("  attention, causal", flops.attention),
        ("  head", flops.head),
        ("backward", flops.backward),
        ("model: what MFU counts", flops.model),
        ("  if attention took all keys", flops.model_with_all_keys),
        ("recomputed layers", flops.recompute),
        ("attention's scores again, in fused kernels", flops.scores_again),
        ("computed in all", flops.hardware),
    ):
        made.add_row(name, in_flops(value))
    return made


def _messages(plan: Plan) -> RenderableType:
    """Of the stage that sends most."""
    stage = max(range(len(plan.traffic)), key=lambda index: sum(item.sent_bytes for item in plan.traffic[index]))
    made = table(f"messages of a step, stage {stage}", "what", "format", "ranks", "tensors", "a rank sends")
    for item in plan.traffic[stage]:
        sizes = in_bytes(item.tensor_bytes), in_bytes(item.sent_bytes)
        made.add_row(traffic_label(item), traffic_format(item), str(item.num_ranks), *sizes)
    return made if plan.traffic[stage] else Text("messages: none, one rank works alone")


def _notes(plan: Plan) -> Iterator[str]:
    memory = plan.gpu.memory_bytes
    if memory is None:
        yield f"{plan.gpu.title}: what memory there is, is the machine's matter"
    else:
        total = plan.fullest.total
        share = f"{in_percent(total / memory)} of {memory / 1e9:.0f} GB"
        verdict = "fits" if total <= 0.9 * memory else "tight: CUDA, NCCL and fragments take some too"
        yield f"fullest rank: {in_bytes(total)} (stage {plan.fullest.stage}), {share}: " + (
            "does not fit" if total > memory else verdict
        )
    waiting = plan.bubble_share
    yield f"pipeline bubble: {in_percent(waiting)} of forward and backward time" if waiting else "no pipeline bubble"
    spent = plan.duration
    budget = in_tokens(spent.num_tokens)
    if spent.withheld is not None:
        yield f"days for {budget}: withheld; {spent.withheld}"
    else:
        assert spent.days is not None
        assert spent.gpu_hours is not None
        of_fp8 = "" if spent.share_of_fp8_peak is None else f", {in_percent(spent.share_of_fp8_peak)} of the FP8 peak"
        yield (
            f"{budget}: {in_days(spent.days)}, {in_gpu_hours(spent.gpu_hours)}, at an assumed MFU of "
            f"{in_percent(spent.mfu)}"
        )
        yield (
            f"  that is {spent.tflops_per_gpu:,.0f} model TFLOP/s per GPU of {plan.gpu.peaks_tflops['bf16']:,.0f} at "
            f"most in dense BF16{of_fp8}; {spent.tokens_per_second:,.0f} tokens/s in all"
        )
    if plan.fp8 is not None:
        yield from _fp8_note(plan)
    yield from plan.deterministic


def _fp8_note(plan: Plan) -> Iterator[str]:
    gain, tokens = plan.fp8, plan.layout.tokens_per_microbatch
    assert gain is not None
    assert plan.bytes_in_bf16 is not None
    verdict = "pays" if gain.saved_us > gain.spent_us else "does not pay"
    yield (
        f"FP8 {verdict}: estimated for an H100, a layer's GEMMs save {gain.saved_us:,.0f} us a micro-batch and its "
        f"casts take {gain.spent_us:,.0f} us"
    )
    if gain.pays_from_tokens is None:
        yield "  at these widths per rank it never pays, however many tokens a micro-batch has"
    else:
        yield f"  at these widths it pays from {gain.pays_from_tokens:,} tokens a micro-batch; there are {tokens:,}"
    yield f"  in BF16 the fullest rank would hold {in_bytes(plan.bytes_in_bf16)}, in FP8 {in_bytes(plan.fullest.total)}"
