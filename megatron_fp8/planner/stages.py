"""Owns where the model's parts lie: the layers of every pipeline stage and chunk, in FP8 or not. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.precision.policy import PrecisionPolicy, build_policy


@dataclass(frozen=True)
class Chunk:
    """A part of a stage that runs as one: its layers, in FP8 and not, and how many of each are computed again.

    `has_embedding`: it is the model's first; `has_head`: its last, with final norm, head and loss.
    """

    num_fp8_layers: int
    num_other_layers: int
    recomputed_fp8_layers: int
    recomputed_other_layers: int
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> int:
        """Layers of the chunk."""
        return self.num_fp8_layers + self.num_other_layers

    @property
    def num_recomputed(self) -> int:
        """Layers that the backward pass computes again."""
        return self.recomputed_fp8_layers + self.recomputed_other_layers


def stage_chunks(config: Config, layout: Layout, stage: int) -> tuple[Chunk, ...]:
    """The chunks of a pipeline stage: chunk `v` holds the layers after those of all stages' chunks before it."""
    policy = build_policy(config.precision, config.model.num_layers)
    last = layout.pipeline_model_parallel_size * layout.num_chunks - 1
    chunks = []
    for chunk in range(layout.num_chunks):
        place = chunk * layout.pipeline_model_parallel_size + stage
        first = place * layout.layers_per_chunk
        in_fp8 = [_runs_in_fp8(policy, layer) for layer in range(first, first + layout.layers_per_chunk)]
        again = in_fp8[: num_recomputed(config, layout.layers_per_chunk)]
        chunks.append(
            Chunk(
                num_fp8_layers=sum(in_fp8),
                num_other_layers=len(in_fp8) - sum(in_fp8),
                recomputed_fp8_layers=sum(again),
                recomputed_other_layers=len(again) - sum(again),
                has_embedding=place == 0,
                has_head=place == last,
            )
        )
    return tuple(chunks)


def num_recomputed(config: Config, num_layers: int) -> int:
    """How many of a chunk's `num_layers` layers, from its first, the backward pass computes again."""
    if config.model.recompute_granularity == "none":
        return 0
    chosen = config.model.recompute_num_layers
    return num_layers if chosen is None else min(chosen, num_layers)


def _runs_in_fp8(policy: PrecisionPolicy, layer: int) -> bool:
    return policy.fp8 is not None and layer not in policy.fp8.bf16_layers
