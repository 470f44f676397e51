"""Owns the search for layouts: those that pass the project's own rules, those of them that fit, the fastest first.

A layout is a value for each key of `SEARCHED_KEYS`; the rest of the config, the global batch above all, stays as it
is. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_fp8.config.check import all_findings
from megatron_fp8.config.facts import Facts
from megatron_fp8.config.layout import Layout, derive_layout
from megatron_fp8.config.load import LoadedConfig
from megatron_fp8.config.problem import show_value
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.gpus import Gpu
from megatron_fp8.planner.memory import StageMemory, stage_memories
from megatron_fp8.planner.speed import StepSeconds, UnknownPeakError, step_seconds

TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
VPP = "parallel.virtual_pipeline_model_parallel_size"
SEQUENCE_PARALLEL, DISTRIBUTED = "parallel.sequence_parallel", "parallel.use_distributed_optimizer"
MICRO_BATCH = "training.micro_batch_size"
RECOMPUTE, RECOMPUTED_LAYERS = "model.recompute_granularity", "model.recompute_num_layers"
SEARCHED_KEYS = (TP, PP, VPP, SEQUENCE_PARALLEL, DISTRIBUTED, MICRO_BATCH, RECOMPUTE, RECOMPUTED_LAYERS)
GPUS_PER_NODE = 8
# CUDA context, NCCL's buffers, fragments of the allocator: no tensors of the run, and a few GB of 80 as people see it.
RESERVED_SHARE = 0.1
_MOST_CHUNKS, _MOST_MICRO_BATCH = 8, 16


@dataclass(frozen=True)
class Proposal:
    """A layout that the rules accept: its keys, sizes, memory by stage, and an estimate of a step's time.

    `seconds` is None for one that does not fit, which is not timed.
    """

    values: Mapping[str, Any]
    layout: Layout
    memories: list[StageMemory]
    seconds: StepSeconds | None

    @property
    def fullest(self) -> StageMemory:
        """The stage that takes most."""
        return max(self.memories, key=lambda memory: memory.total)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks, by the estimate."""
        return None if self.seconds is None else self.layout.tokens_per_global_batch / self.seconds.total

    def overrides(self, config: Config) -> str:
        """What of it is to be changed in `config`, as a command line takes it."""
        facts = Facts(config, None, None)
        changed = {key: value for key, value in self.values.items() if facts.get(key) != value}
        return " ".join(f"{key}={show_value(value)}" for key, value in changed.items()) or "(as the config is)"


@dataclass(frozen=True)
class SearchResult:
    """`fitting`: fastest first. `num_valid`: layouts that the rules accept. `smallest`: the one with the least memory.

    `refused`: where no layout is valid, the mistakes and how many candidates had each, most frequent first.
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
    """Every layout of the config on `world_size` ranks of `gpu`. Raises UnknownPeakError where the GPU says too little.

    A mistake under `data.` is none here: a plan needs no text.
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
        # What fits is not made slower by recomputing more.
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
    """Values of `SEARCHED_KEYS` worth a look; tensor-parallel ranks share a machine, whose links they need."""
    model, training = loaded.config.model, loaded.config.training
    for tp, pp in itertools.product(_divisors(world_size), _divisors(model.num_layers)):
        if tp > gpus_per_node or world_size % (tp * pp):
            continue
        samples = training.global_batch_size * tp * pp / world_size
        per_stage = model.num_layers // pp
        chunks = [None, *(n for n in _divisors(per_stage) if 1 < n <= _MOST_CHUNKS)] if pp > 1 else [None]
        micro_batches = [2**n for n in range(_MOST_MICRO_BATCH.bit_length()) if 2**n <= samples] or [1]
        # With one copy of the model there is nothing that a distributed optimizer could divide.
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
    """None, half of a chunk's layers, all."""
    yield "none", None
    if per_chunk > 1:
        yield "full", per_chunk // 2
    yield "full", None


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
