"""Places the model on pipeline stages: layers of each chunk, parameters of each rank, the 1F1B schedule. No torch.

The schedules are plain 1F1B (Narayanan et al. 2019) and the interleaved one (Narayanan et al. 2021, section 2.2), with
Megatron Core's warm-up: a stage runs ahead by the stages after it; interleaved, by twice those and by all of its chunks
but one for a group of micro-batches as large as the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_fp8.config.layout import Layout, block_parameters, norm_parameters, position_parameters
from megatron_fp8.config.schema import Config
from megatron_fp8.precision.policy import build_policy


@dataclass(frozen=True)
class Chunk:
    """A stage's layers that run as one: in FP8 and not, and how many of each are recomputed in backward.

    `has_embedding`: it is the model's first chunk; `has_head`: its last, with final norm, head and loss.
    """

    num_fp8_layers: int
    num_other_layers: int
    recomputed_fp8_layers: int
    recomputed_other_layers: int
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> int:
        """All layers."""
        return self.num_fp8_layers + self.num_other_layers

    @property
    def num_recomputed(self) -> int:
        """Layers that are recomputed in backward."""
        return self.recomputed_fp8_layers + self.recomputed_other_layers


def stage_chunks(config: Config, layout: Layout, stage: int) -> tuple[Chunk, ...]:
    """The chunks of a pipeline stage: chunk `v` holds the layers after those of all stages' chunks before it."""
    fp8 = build_policy(config.precision, config.model.num_layers).fp8
    last = layout.pipeline_model_parallel_size * layout.num_chunks - 1
    chunks = []
    for chunk in range(layout.num_chunks):
        place = chunk * layout.pipeline_model_parallel_size + stage
        first = place * layout.layers_per_chunk
        layers = range(first, first + layout.layers_per_chunk)
        in_fp8 = [fp8 is not None and layer not in fp8.bf16_layers for layer in layers]
        recomputed = in_fp8[: num_recomputed(config, layout.layers_per_chunk)]
        chunks.append(
            Chunk(
                num_fp8_layers=sum(in_fp8),
                num_other_layers=len(in_fp8) - sum(in_fp8),
                recomputed_fp8_layers=sum(recomputed),
                recomputed_other_layers=len(recomputed) - sum(recomputed),
                has_embedding=place == 0,
                has_head=place == last,
            )
        )
    return tuple(chunks)


def num_recomputed(config: Config, num_layers: int) -> int:
    """How many of a chunk's `num_layers` layers, from its first, are recomputed in backward."""
    if config.model.recompute_granularity == "none":
        return 0
    chosen = config.model.recompute_num_layers
    return num_layers if chosen is None else min(chosen, num_layers)


@dataclass(frozen=True)
class RankParameters:
    """Parameters on one rank of a stage; a tied embedding counts on the first and on the last stage.

    `fp8_gemm_weights`: weights of the linear layers that run in FP8. `replicated`: those that every tensor-parallel
    rank holds (norms, biases of row-parallel layers, positions), part of the other two.
    """

    fp8_gemm_weights: int
    others: int
    replicated: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.fp8_gemm_weights + self.others


def rank_parameters(config: Config, layout: Layout, chunks: Sequence[Chunk]) -> RankParameters:
    """Parameters on each rank of the stage with these chunks."""
    model, tp = config.model, layout.tensor_model_parallel_size
    shapes = block_parameters(model)
    gemm = sum(shape.size for shape in shapes if shape.is_gemm_weight) // tp
    sharded_biases = sum(shape.size for shape in shapes if shape.is_divided and not shape.is_gemm_weight) // tp
    num_layers = sum(chunk.num_layers for chunk in chunks)
    num_fp8 = sum(chunk.num_fp8_layers for chunk in chunks)
    first = any(chunk.has_embedding for chunk in chunks)
    last = any(chunk.has_head for chunk in chunks)
    replicated = num_layers * sum(shape.size for shape in shapes if not shape.is_divided)
    replicated += position_parameters(model) if first else 0
    replicated += norm_parameters(model) if last else 0
    num_vocabularies = 1 if first and last and not model.untie_embeddings_and_output_weights else first + last
    biases = last * model.add_output_bias
    vocabularies = layout.padded_vocab_size_per_rank * (num_vocabularies * model.hidden_size + biases)
    others = (num_layers - num_fp8) * gemm + num_layers * sharded_biases + vocabularies + replicated
    return RankParameters(num_fp8 * gemm, others, replicated)


@dataclass(frozen=True)
class Pass:
    """The forward or backward pass of one micro-batch through one chunk of a stage."""

    is_forward: bool
    micro_batch: int
    chunk: int


def stage_passes(layout: Layout, stage: int, num_microbatches: int | None = None) -> Iterator[Pass]:
    """The passes of `stage` in the order in which it runs them; `num_microbatches`: instead of a step's."""
    pp, chunks = layout.pipeline_model_parallel_size, layout.num_chunks
    count = layout.num_microbatches if num_microbatches is None else num_microbatches
    # Groups of `pp` micro-batches go through all chunks in turn.
    group = pp if chunks > 1 else 1
    forward = [
        (micro_batch, chunk)
        for start in range(0, count, group)
        for chunk in range(chunks)
        for micro_batch in range(start, min(start + group, count))
    ]
    ahead = pp - stage - 1 if chunks == 1 else 2 * (pp - stage - 1) + (chunks - 1) * pp
    ahead = min(ahead, len(forward))
    for index in range(len(forward) + ahead):
        if index < len(forward):
            yield Pass(True, *forward[index])
        if index >= ahead:
            micro_batch, chunk = forward[index - ahead]
            yield Pass(False, micro_batch, chunks - 1 - chunk)


def bubble_share(layout: Layout) -> float:
    """The pipeline bubble as a share of a step's forward and backward time, if all stages take equally long.

    Of `m` micro-batches, `p` stages and `v` chunks a stage: (p - 1) / (v m + p - 1). Narayanan et al. 2021, section
    2.2, give (p - 1) / (v m), of the time without the bubble.
    """
    idle = layout.pipeline_model_parallel_size - 1
    return idle / (layout.num_chunks * layout.num_microbatches + idle)
