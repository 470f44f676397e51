"""Owns the plan of one run: everything that is known before it starts, put together. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.communication import Traffic, step_traffic
from megatron_fp8.planner.determinism import deterministic_notes
from megatron_fp8.planner.duration import DEFAULT_MFU, Duration, Fp8Gain, duration, fp8_gain
from megatron_fp8.planner.flops import FlopsPerToken, flops_per_token
from megatron_fp8.planner.gpus import Gpu
from megatron_fp8.planner.memory import StageMemory, stage_memories
from megatron_fp8.planner.parameters import ModelParameters, RankParameters, model_parameters, rank_parameters
from megatron_fp8.planner.schedule import bubble_share
from megatron_fp8.planner.stages import stage_chunks
from megatron_fp8.precision.chart_labels import format_label, message_label


@dataclass(frozen=True)
class Plan:
    """What a run takes.

    `memories`, `rank_parameters` and `traffic` are by pipeline stage. `fp8` and `bytes_in_bf16`, what the fullest rank
    would hold in BF16, are None where nothing runs in FP8. `deterministic`: what
    `training.deterministic_mode` changes, in words; empty without it.
    """

    name: str
    gpu: Gpu
    layout: Layout
    parameters: ModelParameters
    rank_parameters: list[RankParameters]
    memories: list[StageMemory]
    flops: FlopsPerToken
    bubble_share: float
    traffic: list[list[Traffic]]
    duration: Duration
    fp8: Fp8Gain | None
    bytes_in_bf16: float | None
    deterministic: tuple[str, ...]

    @property
    def fullest(self) -> StageMemory:
        """The stage whose ranks hold most."""
        return max(self.memories, key=lambda memory: memory.total)

    def as_json(self) -> dict[str, Any]:
        """Plain data; bytes, FLOPs per token, seconds, shares between 0 and 1."""
        layout = self.layout
        return {
            "name": self.name,
            "gpu": self.gpu.name,
            "world_size": layout.world_size,
            "layout": {
                "tensor_model_parallel_size": layout.tensor_model_parallel_size,
                "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
                "chunks_per_stage": layout.num_chunks,
                "data_parallel_size": layout.data_parallel_size,
                "micro_batches": layout.num_microbatches,
                "tokens_per_step": layout.tokens_per_global_batch,
            },
            "parameters": asdict(self.parameters),
            "parameters_per_rank": [rank.total for rank in self.rank_parameters],
            "memory_bytes": [
                {**{kind.value: size for kind, size in memory.by_kind.items()}, "total": memory.total}
                for memory in self.memories
            ],
            "flops_per_token": {
                **asdict(self.flops),
                **{
                    name: getattr(self.flops, name)
                    for name in ("forward", "backward", "model", "hardware", "model_with_all_keys")
                },
            },
            "bubble_share": self.bubble_share,
            "messages_per_step": [[_traffic_json(item) for item in stage] for stage in self.traffic],
            "duration": asdict(self.duration),
            "fp8": None if self.fp8 is None else asdict(self.fp8),
            "memory_bytes_in_bf16": self.bytes_in_bf16,
            "deterministic": list(self.deterministic),
        }


def traffic_label(item: Traffic) -> str:
    """Who sends what."""
    message = item.message
    return message_label(message.group, message.collective, message.tensor, message.phase)


def traffic_format(item: Traffic) -> str:
    """In which format."""
    return format_label(item.message.format, item.message.scales)


def _traffic_json(item: Traffic) -> dict[str, Any]:
    return {
        "name": traffic_label(item),
        "group": item.message.group.value,
        "format": traffic_format(item),
        "num_ranks": item.num_ranks,
        "tensor_bytes": item.tensor_bytes,
        "sent_bytes": item.sent_bytes,
        "waits": item.waits,
    }


def make_plan(
    config: Config, layout: Layout, gpu: Gpu, num_tokens: float | None = None, mfu: float = DEFAULT_MFU
) -> Plan:
    """The plan of `config` on `layout`; `num_tokens`: the budget (None: the config's own length)."""
    stages = range(layout.pipeline_model_parallel_size)
    flops = flops_per_token(config, layout)
    tokens = num_tokens or float(layout.tokens_per_global_batch * config.training.train_iters)
    return Plan(
        name=config.run.name,
        gpu=gpu,
        layout=layout,
        parameters=model_parameters(config, layout),
        rank_parameters=[rank_parameters(config, layout, stage_chunks(config, layout, stage)) for stage in stages],
        memories=stage_memories(config, layout, gpu),
        flops=flops,
        bubble_share=bubble_share(layout),
        traffic=[step_traffic(config, layout, stage) for stage in stages],
        duration=duration(config, layout, flops, gpu, tokens, mfu),
        fp8=fp8_gain(layout) if config.precision.mode == "fp8" else None,
        bytes_in_bf16=_bytes_in_bf16(config, layout, gpu) if config.precision.mode == "fp8" else None,
        deterministic=tuple(deterministic_notes(config, layout, gpu)),
    )


def _bytes_in_bf16(config: Config, layout: Layout, gpu: Gpu) -> float:
    precision = config.precision.model_copy(update={"mode": "bf16"})
    memories = stage_memories(config.model_copy(update={"precision": precision}), layout, gpu)
    return max(memory.total for memory in memories)
