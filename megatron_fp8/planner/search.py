"""Searches layouts: those that pass the config's rules and fit the GPU, fastest first. Imports no torch.

A layout is a value for each key of `SEARCHED_KEYS`; the rest of the config stays, above all the global batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group
from rich.text import Text

from megatron_fp8.config.check import all_findings
from megatron_fp8.config.facts import Facts, divisors
from megatron_fp8.config.layout import Layout, derive_layout
from megatron_fp8.config.load import LoadedConfig
from megatron_fp8.config.problem import show_value
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.flops import StepSeconds, UnknownPeakError, step_seconds
from megatron_fp8.planner.gpus import Gpu
from megatron_fp8.planner.memory import StageMemory, stage_memories
from megatron_fp8.planner.plan_report import MEMORY_LABELS, in_bytes, in_percent, table

TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
VPP = "parallel.virtual_pipeline_model_parallel_size"
SEQUENCE_PARALLEL, DISTRIBUTED = "parallel.sequence_parallel", "parallel.use_distributed_optimizer"
MICRO_BATCH = "training.micro_batch_size"
RECOMPUTE, RECOMPUTED_LAYERS = "model.recompute_granularity", "model.recompute_num_layers"
SEARCHED_KEYS = (TP, PP, VPP, SEQUENCE_PARALLEL, DISTRIBUTED, MICRO_BATCH, RECOMPUTE, RECOMPUTED_LAYERS)
GPUS_PER_NODE = 8
# For the CUDA context, NCCL's buffers and the allocator's fragmentation: a few GB of 80.
RESERVED_SHARE = 0.1
_MAX_CHUNKS, _MAX_MICRO_BATCH, _MAX_REASONS = 8, 16, 5


@dataclass(frozen=True)
class Proposal:
    """A layout that the rules accept: values of its keys, memory by stage, and an estimate of a step's time.

    `seconds` is None for one that does not fit.
    """

    values: Mapping[str, Any]
    layout: Layout
    memories: list[StageMemory]
    seconds: StepSeconds | None

    @property
    def fullest(self) -> StageMemory:
        """The stage whose ranks hold most."""
        return max(self.memories, key=lambda memory: memory.total)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks, as estimated."""
        return None if self.seconds is None else self.layout.tokens_per_global_batch / self.seconds.total

    def overrides(self, config: Config) -> str:
        """What to override in `config` to get it, as a command line takes it."""
        facts = Facts(config, None, None)
        changed = {key: value for key, value in self.values.items() if facts.get(key) != value}
        return " ".join(f"{key}={show_value(value)}" for key, value in changed.items()) or "(the config as it is)"


@dataclass(frozen=True)
class SearchResult:
    """`fitting`: fastest first. `num_valid`: layouts that the rules accept. `smallest`: the one with the least memory.

    `refused`: if no layout is valid, the mistakes and how many candidates had each, most frequent first.
    """

    world_size: int
    gpu: Gpu
    usable_bytes: float
    num_candidates: int
    num_valid: int
    fitting: list[Proposal]
    smallest: Proposal | None
    refused: dict[str, int]


def search(
    loaded: LoadedConfig,
    world_size: int,
    vocab_size: int | None,
    gpu: Gpu,
    gpus_per_node: int = GPUS_PER_NODE,
    reserved_share: float = RESERVED_SHARE,
) -> SearchResult:
    """Every layout of the config on `world_size` ranks of `gpu`; mistakes under `data.` do not matter.

    Raises UnknownPeakError for a GPU whose memory or peak is unknown.
    """
    if gpu.memory_bytes is None or gpu.peak_flops(loaded.config.precision.mode) is None:
        raise UnknownPeakError(gpu.why_unknown(loaded.config.precision.mode))
    usable = gpu.memory_bytes * (1 - reserved_share)
    fitting: list[Proposal] = []
    done: set[tuple[Any, ...]] = set()
    smallest: Proposal | None = None
    refused: dict[str, int] = {}
    num_candidates = num_valid = 0
    for values in candidates(loaded, world_size, gpus_per_node):
        # Once a layout fits, more recomputation only slows it down.
        others = tuple(value for key, value in values.items() if key not in (RECOMPUTE, RECOMPUTED_LAYERS))
        if others in done:
            continue
        num_candidates += 1
        changed = with_values(loaded, world_size, values)
        facts = Facts(changed.config, world_size, vocab_size)
        findings = [finding for finding in all_findings(facts) if not finding.key.startswith("data.")]
        if findings:
            for finding in findings:
                reason = f"{finding.key}={show_value(facts.get(finding.key))}: {finding.reason}"
                refused[reason] = refused.get(reason, 0) + 1
            continue
        num_valid += 1
        layout = derive_layout(changed.config, world_size, vocab_size)
        proposal = Proposal(values, layout, stage_memories(changed.config, layout, gpu), None)
        if smallest is None or proposal.fullest.total < smallest.fullest.total:
            smallest = proposal
        if proposal.fullest.total <= usable:
            seconds = step_seconds(changed.config, layout, gpu, proposal.memories, gpus_per_node)
            fitting.append(replace(proposal, seconds=seconds))
            done.add(others)
    fitting.sort(key=lambda item: (item.seconds.total if item.seconds else 0.0, item.fullest.total))
    reasons = dict(sorted(refused.items(), key=lambda item: -item[1])) if not num_valid else {}
    return SearchResult(world_size, gpu, usable, num_candidates, num_valid, fitting, smallest, reasons)


def candidates(loaded: LoadedConfig, world_size: int, gpus_per_node: int) -> Iterator[dict[str, Any]]:
    """Values of `SEARCHED_KEYS` worth trying; tensor-parallel ranks stay on one node, whose links they need."""
    model, training = loaded.config.model, loaded.config.training
    for tp, pp in itertools.product(divisors(world_size, near=0), divisors(model.num_layers, near=0)):
        if tp > gpus_per_node or world_size % (tp * pp):
            continue
        samples = training.global_batch_size * tp * pp / world_size
        per_stage = model.num_layers // pp
        chunks = [None, *(n for n in divisors(per_stage, near=0) if 1 < n <= _MAX_CHUNKS)] if pp > 1 else [None]
        micro_batches = [2**n for n in range(_MAX_MICRO_BATCH.bit_length()) if 2**n <= samples] or [1]
        # Without data parallelism a distributed optimizer has nothing to shard.
        optimizers = (True, False) if world_size > tp * pp else (loaded.config.parallel.use_distributed_optimizer,)
        for vpp, micro, sequence, distributed in itertools.product(
            chunks, micro_batches, (True, False) if tp > 1 else (False,), optimizers
        ):
            per_chunk = per_stage // (vpp or 1)
            for recompute, layers in _recomputations(per_chunk):
                keys = (tp, pp, vpp, sequence, distributed, micro, recompute, layers)
                yield dict(zip(SEARCHED_KEYS, keys, strict=True))


def with_values(loaded: LoadedConfig, world_size: int, values: Mapping[str, Any]) -> LoadedConfig:
    """The config with other values of some keys."""
    facts = Facts(loaded.config, world_size, None)
    for key, value in values.items():
        facts = facts.with_value(key, value)
    return LoadedConfig(facts.config, loaded.origins)


def _recomputations(per_chunk: int) -> Iterator[tuple[str, int | None]]:
    """No layers, half of a chunk's, all."""
    yield "none", None
    if per_chunk > 1:
        yield "full", per_chunk // 2
    yield "full", None


def search_tables(result: SearchResult, num_shown: int) -> Group:
    """The `num_shown` fastest layouts, or why none fits."""
    head = (
        f"{result.world_size} x {result.gpu.title}: {result.num_candidates:,} layouts tried, "
        f"{result.num_valid:,} valid, {len(result.fitting):,} fit into {in_bytes(result.usable_bytes)}"
    )
    if not result.fitting:
        return Group(Text(head, style="bold"), *(Text(line) for line in _why_none(result)))
    columns = ("TP x PP x DP", "chunks", "micro-batch", "SP", "optimizer", "recompute", "memory", "bubble", "step")
    made = table("fastest first, by estimated step time", "", *columns, "tokens/s/GPU")
    for number, proposal in enumerate(result.fitting[:num_shown], 1):
        made.add_row(str(number), *_cells(proposal))
    return Group(Text(head, style="bold"), made, Text("The estimate ranks layouts; it is not a forecast."))


def _cells(proposal: Proposal) -> Iterator[str]:
    layout, values, seconds = proposal.layout, proposal.values, proposal.seconds
    assert seconds is not None
    yield f"{layout.tensor_model_parallel_size} x {layout.pipeline_model_parallel_size} x {layout.data_parallel_size}"
    yield str(layout.num_chunks)
    yield str(values[MICRO_BATCH])
    yield "yes" if values[SEQUENCE_PARALLEL] else "no"
    yield "distributed" if values[DISTRIBUTED] else "replicated"
    layers = values[RECOMPUTED_LAYERS]
    some = "all layers" if layers is None else f"{layers} of {layout.layers_per_chunk}"
    yield "none" if values[RECOMPUTE] == "none" else some
    yield in_bytes(proposal.fullest.total)
    yield in_percent(seconds.bubble / seconds.total)
    yield f"{seconds.total:,.3f} s"
    yield f"{layout.tokens_per_global_batch / seconds.total / layout.world_size:,.0f}"


def override_lines(result: SearchResult, config: Config, num_shown: int) -> Iterator[str]:
    """What to type for each layout of the table; to be printed without wrapping."""
    if result.fitting:
        yield f"To plan or run one of them: --world-size {result.world_size} and"
    for number, proposal in enumerate(result.fitting[:num_shown], 1):
        yield f"{number}: {proposal.overrides(config)}"


def _why_none(result: SearchResult) -> Iterator[str]:
    smallest = result.smallest
    if smallest is None:
        yield "No layout passes the rules. Reasons, and the number of layouts with each:"
        for reason, count in list(result.refused.items())[:_MAX_REASONS]:
            yield f"  {count:,}: {reason}"
        return
    fullest = smallest.fullest
    kind, size = max(fullest.by_kind.items(), key=lambda item: item[1])
    yield (
        f"No layout fits. The smallest takes {in_bytes(fullest.total)} on stage {fullest.stage}, "
        f"{in_bytes(fullest.total - result.usable_bytes)} too much; most of it is {MEMORY_LABELS[kind]}, "
        f"{in_bytes(size)}:"
    )
    yield "  " + ", ".join(f"{key.partition('.')[2]} {value}" for key, value in smallest.values.items())
    yield "Use more GPUs, GPUs with more memory, or a smaller model or sequence."


def search_json(result: SearchResult, config: Config, num_shown: int) -> dict[str, Any]:
    """Plain data: bytes, seconds, tokens per second of all ranks."""
    return {
        "world_size": result.world_size,
        "gpu": result.gpu.name,
        "usable_bytes": result.usable_bytes,
        "num_candidates": result.num_candidates,
        "num_valid": result.num_valid,
        "num_fitting": len(result.fitting),
        "why_none": [] if result.fitting else list(_why_none(result)),
        "layouts": [
            {
                "values": dict(item.values),
                "overrides": item.overrides(config),
                "memory_bytes": item.fullest.total,
                "step_seconds": None if item.seconds is None else item.seconds.total,
                "tokens_per_second": item.tokens_per_second,
            }
            for item in result.fitting[:num_shown]
        ],
    }
