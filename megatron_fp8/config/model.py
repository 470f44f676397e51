"""Owns the `model` section of the config: every field, its unit and its range.

Knows nothing of other sections; what must hold between fields is in `config/check.py`. Imports no torch.
"""

from typing import Literal

from pydantic import Field

from megatron_fp8.config.base import Section
from megatron_fp8.config.limits import (
    FP32_SMALLEST_NORMAL,
    MOST_DIVISIBLE_BY,
    MOST_DROPOUT,
    MOST_EPSILON,
    MOST_FEATURES,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_ROTARY_BASE,
    MOST_STD,
    MOST_VOCABULARY,
    SMALLEST_ROTARY_BASE,
    SMALLEST_STD,
)


class ModelConfig(Section):
    """A decoder-only transformer, in Megatron's argument names."""

    num_layers: int = Field(ge=1, le=MOST_LAYERS)
    """Transformer layers of the whole model, over all pipeline stages."""
    hidden_size: int = Field(ge=1, le=MOST_FEATURES)
    """Width of the residual stream, in features."""
    num_attention_heads: int = Field(ge=1, le=MOST_HEADS)
    """Query heads of each attention block, over all tensor-parallel ranks."""
    num_query_groups: int | None = Field(default=None, ge=1, le=MOST_HEADS)
    """Key/value heads (grouped-query attention); null: as many as `num_attention_heads`."""
    kv_channels: int | None = Field(default=None, ge=1, le=MOST_FEATURES)
    """Features per head; null: hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = Field(default=None, ge=1, le=MOST_FEATURES)
    """Width of the MLP's inner layer in features; null: 4 x hidden_size."""
    seq_length: int = Field(ge=1, le=MOST_POSITIONS)
    """Tokens per training sample."""
    max_position_embeddings: int | None = Field(default=None, ge=1, le=MOST_POSITIONS)
    """Rows of the learned position table, in tokens; null: seq_length. With RoPE only what an exported model is said to
    take."""
    position_embedding_type: Literal["rope", "learned_absolute"] = "rope"
    """How positions reach the model."""
    rotary_base: float = Field(default=10000.0, ge=SMALLEST_ROTARY_BASE, le=MOST_ROTARY_BASE)
    """RoPE's base: the longest wavelength is 2 pi x rotary_base tokens."""
    rotary_percent: float = Field(default=1.0, gt=0, le=1)
    """Share of each head's features that RoPE rotates."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    """Kind of every norm."""
    norm_epsilon: float = Field(default=1e-5, ge=FP32_SMALLEST_NORMAL, le=MOST_EPSILON)
    """Added to the variance inside every norm."""
    activation: Literal["gelu", "geglu", "relu", "reglu", "srelu", "swiglu"] = "swiglu"
    """MLP activation; the gated ones double the first MLP weight's rows."""
    add_bias_linear: bool = False
    """Biases on the linear layers."""
    untie_embeddings_and_output_weights: bool = True
    """Give the output head a weight of its own; false: it shares the word embedding's."""
    fuse_qkv_params: bool = True
    """One QKV weight; false: three (query, key, value), as TE offers both."""
    hidden_dropout: float = Field(default=0.0, ge=0, le=MOST_DROPOUT)
    """Dropout probability on the embedding and on each block's output."""
    attention_dropout: float = Field(default=0.0, ge=0, le=MOST_DROPOUT)
    """Dropout probability on the attention probabilities."""
    init_method_std: float = Field(default=0.02, ge=SMALLEST_STD, le=MOST_STD)
    """Standard deviation of the normal initialization; output projections: over sqrt(2 x num_layers)."""
    vocab_size: int | None = Field(default=None, ge=1, le=MOST_VOCABULARY)
    """Tokens of the vocabulary before padding; null: the tokenizer's size."""
    make_vocab_size_divisible_by: int = Field(default=128, ge=1, le=MOST_DIVISIBLE_BY)
    """The vocabulary is padded to a multiple of this times tensor_model_parallel_size."""
    recompute_granularity: Literal["none", "full"] = "none"
    """`full`: keep only each layer's input and compute the layer again in the backward pass."""
    recompute_num_layers: int | None = Field(default=None, ge=0, le=MOST_LAYERS)
    """With `full`: how many layers of each pipeline stage's chunk are recomputed; null: all."""
