"""Owns the count of parameters: of the model by part, and of what one rank of a pipeline stage holds. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fp8.config.layout import (
    Layout,
    block_parameters,
    count_parameters,
    norm_parameters,
    position_parameters,
)
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.stages import Chunk


@dataclass(frozen=True)
class ModelParameters:
    """Parameters of the whole model. `head` is 0 where it shares the word embedding's weight.

    All but `without_padding` count the rows that pad the vocabulary.
    """

    total: int
    without_padding: int
    word_embedding: int
    position_embedding: int
    per_layer: int
    final_norm: int
    head: int


@dataclass(frozen=True)
class RankParameters:
    """Parameters that one rank of a stage holds; the last stage has a tied embedding again.

    `fp8_gemm_weights`: weights of the linear layers that run in FP8. `whole`: those that every tensor-parallel rank
    holds whole (norms, biases after a sum over ranks, positions), part of the other two.
    """

    fp8_gemm_weights: int
    others: int
    whole: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.fp8_gemm_weights + self.others


def model_parameters(config: Config, layout: Layout) -> ModelParameters:
    """The whole model's parameters by part."""
    model = config.model
    vocabulary = layout.padded_vocab_size * model.hidden_size
    return ModelParameters(
        total=layout.num_parameters,
        without_padding=count_parameters(model, layout.vocab_size),
        word_embedding=vocabulary,
        position_embedding=position_parameters(model),
        per_layer=sum(shape.size for shape in block_parameters(model)),
        final_norm=norm_parameters(model),
        head=vocabulary if model.untie_embeddings_and_output_weights else 0,
    )


def rank_parameters(config: Config, layout: Layout, chunks: Sequence[Chunk]) -> RankParameters:
    """What each rank of the stage with these chunks holds."""
    model, tp = config.model, layout.tensor_model_parallel_size
    shapes = block_parameters(model)
    gemm = sum(shape.size for shape in shapes if shape.is_gemm_weight) // tp
    whole = sum(shape.size for shape in shapes if not shape.is_divided)
    small = whole + sum(shape.size for shape in shapes if shape.is_divided and not shape.is_gemm_weight) // tp
    num_layers = sum(chunk.num_layers for chunk in chunks)
    num_fp8 = sum(chunk.num_fp8_layers for chunk in chunks)
    vocabulary = layout.padded_vocab_size_per_rank * model.hidden_size
    first = any(chunk.has_embedding for chunk in chunks)
    last = any(chunk.has_head for chunk in chunks)
    whole_here = num_layers * whole
    whole_here += position_parameters(model) if first else 0
    whole_here += norm_parameters(model) if last else 0
    ties_here = first and last and not model.untie_embeddings_and_output_weights
    vocabularies = first + last - ties_here
    others = (num_layers - num_fp8) * gemm + num_layers * (small - whole) + vocabularies * vocabulary + whole_here
    return RankParameters(num_fp8 * gemm, others, whole_here)
