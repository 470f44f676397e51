"""Derives sizes from a config, a world size and a vocabulary: what a rank holds.

Whether the sizes fit is `config/check.py`'s matter. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_fp8.config.layer_kinds import mlp_has_bias, qkv_has_bias
from megatron_fp8.config.schema import Config, ModelConfig

GATED_ACTIVATIONS = frozenset({"geglu", "reglu", "swiglu", "exact_geglu"})


@dataclass(frozen=True)
class GemmShape:
    """One linear layer's GEMM on one rank and micro-batch: `[tokens, in] x [out, in]^T -> [tokens, out]`.

    The backward pass multiplies `[tokens, out] x [out, in]` (dgrad) and `[out, tokens] x [tokens, in]` (wgrad).
    """

    name: str
    num_tokens: int
    in_features: int
    out_features: int


@dataclass(frozen=True)
class ParameterShape:
    """A parameter of a block, or query, key and value together: `size` elements over all tensor-parallel ranks.

    `is_divided`: each of these ranks holds its share; else each holds the whole. `is_gemm_weight`: a linear layer's
    weight, which FP8 layers read in FP8.
    """

    name: str
    size: int
    is_divided: bool
    is_gemm_weight: bool = False


@dataclass(frozen=True)
class Layout:
    """Derived sizes. Sizes of the whole model carry no suffix, those of one rank end in `_per_rank`.

    `qkv_rows`, `fc1_rows`: rows of the QKV and of the MLP's first weight (gated activations have twice
    `ffn_hidden_size`). `rotary_dim`: features of each head that RoPE rotates. `num_chunks`: model chunks per
    pipeline stage. `gemms`: the four linear layers of a block.
    """

    world_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    num_chunks: int
    data_parallel_size: int
    num_microbatches: int
    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    vocab_size: int
    padded_vocab_size: int
    kv_channels: int
    num_query_groups: int
    ffn_hidden_size: int
    max_position_embeddings: int
    rotary_dim: int
    qkv_rows: int
    fc1_rows: int
    layers_per_stage: int
    layers_per_chunk: int
    padded_vocab_size_per_rank: int
    attention_heads_per_rank: int
    query_groups_per_rank: int
    ffn_hidden_size_per_rank: int
    seq_length_per_rank: int
    tokens_per_microbatch: int
    tokens_per_global_batch: int
    num_parameters: int
    gemms: tuple[GemmShape, ...]


class LayoutError(ValueError):
    """The sizes do not divide, or the vocabulary is unknown; `check_config` reports these to a person."""


def derive_layout(config: Config, world_size: int, vocab_size: int | None) -> Layout:
    """The sizes of `config` on `world_size` ranks.

    `vocab_size`: tokens of the tokenizer before padding; `model.vocab_size`, where set, takes its place.
    Raises LayoutError where a size does not divide by the parallel size that shares it.
    """
    model, parallel, training = config.model, config.parallel, config.training
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    num_chunks = parallel.virtual_pipeline_model_parallel_size or 1
    dp = _exact(world_size, tp * pp * parallel.context_parallel_size, "world size")
    vocab_size = model.vocab_size or vocab_size
    if vocab_size is None:
        raise LayoutError("the vocabulary's size is unknown: no model.vocab_size, no tokenizer")
    padded_vocab_size = pad_vocab_size(vocab_size, model.make_vocab_size_divisible_by, tp)
    kv_channels, num_query_groups = head_size(model), query_groups(model)
    ffn_hidden_size = mlp_size(model)
    return Layout(
        world_size=world_size,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        num_chunks=num_chunks,
        data_parallel_size=dp,
        num_microbatches=_exact(
            training.global_batch_size, training.micro_batch_size * dp, "training.global_batch_size"
        ),
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        seq_length=model.seq_length,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
        kv_channels=kv_channels,
        num_query_groups=num_query_groups,
        ffn_hidden_size=ffn_hidden_size,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        rotary_dim=rotary_dim(model),
        qkv_rows=qkv_rows(model),
        fc1_rows=fc1_rows(model),
        layers_per_stage=_exact(model.num_layers, pp, "model.num_layers"),
        layers_per_chunk=_exact(model.num_layers, pp * num_chunks, "model.num_layers"),
        padded_vocab_size_per_rank=padded_vocab_size // tp,
        attention_heads_per_rank=_exact(model.num_attention_heads, tp, "model.num_attention_heads"),
        query_groups_per_rank=_exact(num_query_groups, tp, "model.num_query_groups"),
        ffn_hidden_size_per_rank=_exact(ffn_hidden_size, tp, "model.ffn_hidden_size"),
        seq_length_per_rank=_exact(model.seq_length, tp if parallel.sequence_parallel else 1, "model.seq_length"),
        tokens_per_microbatch=model.seq_length * training.micro_batch_size,
        tokens_per_global_batch=model.seq_length * training.global_batch_size,
        num_parameters=count_parameters(model, padded_vocab_size),
        gemms=block_gemms(config),
    )


def pad_vocab_size(vocab_size: int, divisible_by: int, tensor_model_parallel_size: int) -> int:
    """`vocab_size` rounded up to a multiple of `divisible_by` x TP, as in Megatron: 50257 to 50304 at 128."""
    return round_up(vocab_size, divisible_by * tensor_model_parallel_size)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below `number`."""
    return -(-number // multiple) * multiple


def head_size(model: ModelConfig) -> int:
    """Features per attention head. LayoutError where hidden_size does not divide by the heads."""
    if model.kv_channels is not None:
        return model.kv_channels
    return _exact(model.hidden_size, model.num_attention_heads, "model.hidden_size")


def query_groups(model: ModelConfig) -> int:
    """Key/value heads."""
    return model.num_attention_heads if model.num_query_groups is None else model.num_query_groups


def mlp_size(model: ModelConfig) -> int:
    """Width of the MLP's inner layer."""
    return 4 * model.hidden_size if model.ffn_hidden_size is None else model.ffn_hidden_size


def rotary_dim(model: ModelConfig) -> int:
    """Features per head that RoPE rotates; TE truncates the share as Python's `int` does."""
    return int(head_size(model) * model.rotary_percent)


def qkv_rows(model: ModelConfig) -> int:
    """Rows of the QKV weight: a query per head, a key and a value per query group."""
    return (model.num_attention_heads + 2 * query_groups(model)) * head_size(model)


def fc1_rows(model: ModelConfig) -> int:
    """Rows of the MLP's first weight."""
    return mlp_size(model) * (2 if model.activation in GATED_ACTIVATIONS else 1)


def block_gemms(config: Config) -> tuple[GemmShape, ...]:
    """The four linear layers of a block on one rank; LayoutError where a size does not divide."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    tokens = model.seq_length * config.training.micro_batch_size
    attention = _exact(model.num_attention_heads, tp, "model.num_attention_heads") * head_size(model)
    _exact(query_groups(model), tp, "model.num_query_groups")
    ffn = _exact(mlp_size(model), tp, "model.ffn_hidden_size")
    return (
        GemmShape("qkv", tokens, model.hidden_size, qkv_rows(model) // tp),
        GemmShape("proj", tokens, attention, model.hidden_size),
        GemmShape("fc1", tokens, model.hidden_size, fc1_rows(model) // tp),
        GemmShape("fc2", tokens, ffn, model.hidden_size),
    )


def block_parameters(model: ModelConfig) -> tuple[ParameterShape, ...]:
    """What a block learns, in the order of its parts."""
    hidden, attention = model.hidden_size, model.num_attention_heads * head_size(model)
    has_pre_norms, shares_norm = model.norm_placement != "post", model.parallel_attention_mlp == "shared_norm"
    shapes: list[ParameterShape] = []
    for name, rows, columns, column_parallel, has_bias in (
        ("qkv", qkv_rows(model), hidden, True, qkv_has_bias(model)),
        ("proj", hidden, attention, False, model.add_bias_linear),
        ("fc1", fc1_rows(model), hidden, True, mlp_has_bias(model)),
        ("fc2", hidden, mlp_size(model), False, mlp_has_bias(model)),
    ):
        if column_parallel and has_pre_norms and not (name == "fc1" and shares_norm):
            shapes.append(ParameterShape(f"norm before {name}", norm_parameters(model), is_divided=False))
        shapes.append(ParameterShape(f"{name} weight", rows * columns, is_divided=True, is_gemm_weight=True))
        if has_bias:
            shapes.append(ParameterShape(f"{name} bias", rows, is_divided=column_parallel))
        if name == "qkv":
            shapes += _head_parameters(model)
        if not column_parallel and model.norm_placement != "pre":
            shapes.append(ParameterShape(f"norm after {name}", norm_parameters(model), is_divided=False))
    return tuple(shapes)


def _head_parameters(model: ModelConfig) -> list[ParameterShape]:
    """What attention learns beside its linear layers."""
    shapes, size = [], head_size(model)
    if model.qk_layernorm == "all_heads":
        features = (model.num_attention_heads + query_groups(model)) * size
        shapes.append(ParameterShape("norm of queries and keys", features, is_divided=True))
    elif model.qk_layernorm != "none":
        shapes.append(ParameterShape("norm of queries and keys", 2 * norm_parameters(model, size), is_divided=False))
    if model.softmax_type == "learnable":
        shapes.append(ParameterShape("attention sinks", model.num_attention_heads, is_divided=True))
    return shapes


def norm_parameters(model: ModelConfig, features: int | None = None) -> int:
    """Parameters of one norm, over the residual stream or over `features`."""
    if not model.norm_affine:
        return 0
    return (features or model.hidden_size) * (2 if model.normalization == "LayerNorm" else 1)


def position_parameters(model: ModelConfig) -> int:
    """Parameters of the learned position table; RoPE has none."""
    if model.position_embedding_type != "learned_absolute":
        return 0
    return (model.max_position_embeddings or model.seq_length) * model.hidden_size


def head_parameters(model: ModelConfig, rows: int) -> int:
    """Parameters that the head has for itself, of `rows` vocabulary entries: its weight if untied, its bias."""
    per_row = model.hidden_size if model.untie_embeddings_and_output_weights else 0
    return rows * (per_row + model.add_output_bias)


def shape_of_weights(model: ModelConfig) -> dict[str, Any]:
    """What gives parameters their names and shapes, by key of the `model` section; without the vocabulary."""
    same = (
        *("num_layers", "hidden_size", "num_attention_heads", "normalization", "norm_affine", "norm_placement"),
        *("add_bias_linear", "add_output_bias", "untie_embeddings_and_output_weights", "fuse_qkv_params"),
    )
    return {
        **{key: getattr(model, key) for key in same},
        "num_query_groups": query_groups(model),
        "kv_channels": head_size(model),
        "ffn_hidden_size": mlp_size(model),
        "activation": (model.activation in GATED_ACTIVATIONS, model.activation.startswith("exact_")),
        "add_qkv_bias": qkv_has_bias(model),
        "add_mlp_bias": mlp_has_bias(model),
        "qk_layernorm": model.qk_layernorm.removesuffix("_after_rope"),
        "parallel_attention_mlp": model.parallel_attention_mlp == "shared_norm",
        "softmax_type": model.softmax_type == "learnable",
        "position_embedding_type": model.position_embedding_type == "learned_absolute",
        # Rows of the position table, which one of the two gives.
        **dict.fromkeys(("max_position_embeddings", "seq_length"), position_parameters(model)),
    }


def count_parameters(model: ModelConfig, padded_vocab_size: int) -> int:
    """Parameters of the whole model, rows of the padded vocabulary included."""
    block = sum(shape.size for shape in block_parameters(model))
    vocabulary = padded_vocab_size * model.hidden_size + head_parameters(model, padded_vocab_size)
    return model.num_layers * block + norm_parameters(model) + vocabulary + position_parameters(model)


def _exact(number: int, divisor: int, name: str) -> int:
    if number % divisor:
        raise LayoutError(f"{name} {number} is not a multiple of {divisor}")
    return number // divisor
