"""What differs from layer to layer, and between a block's linear layers: windows, RoPE, biases. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_fp8.config.schema import ModelConfig


def window_of(model: ModelConfig, layer: int) -> int | None:
    """How many tokens before itself a token attends to in the layer with this number, from 0; None: all."""
    if model.window_size is None or is_chosen(model.window_attn_skip_freq, layer, of_pattern=0):
        return None
    return model.window_size[0]


def has_rope(model: ModelConfig, layer: int) -> bool:
    """Whether RoPE rotates the layer's queries and keys."""
    return model.position_embedding_type == "rope" and not is_chosen(model.no_rope_freq, layer, of_pattern=1)


def uses_local_rope(model: ModelConfig, layer: int) -> bool:
    """Whether the layer's RoPE is that of `rotary_base_local`."""
    return model.rotary_base_local is not None and window_of(model, layer) is not None


def is_chosen(frequency: Sequence[int] | None, layer: int, of_pattern: int) -> bool:
    """Whether a layer is one of every N, or marked `of_pattern` in a list with a number for each layer.

    Megatron's `window_attn_skip_freq` and `no_rope_freq`.
    """
    if frequency is None:
        return False
    if len(frequency) == 1:
        return (layer + 1) % frequency[0] == 0
    return frequency[layer] == of_pattern


def qkv_has_bias(model: ModelConfig) -> bool:
    """Whether QKV has biases."""
    return model.add_bias_linear if model.add_qkv_bias is None else model.add_qkv_bias


def mlp_has_bias(model: ModelConfig) -> bool:
    """Whether the MLP's two linear layers have biases."""
    return model.add_bias_linear if model.add_mlp_bias is None else model.add_mlp_bias


def mlp_is_separate(model: ModelConfig) -> bool:
    """Whether the MLP is two linear layers: no norm before it, or an activation that TE has no kernel for."""
    return model.norm_placement == "post" or model.activation.startswith("exact_")


def original_length(model: ModelConfig) -> int:
    """Tokens of a sequence before RoPE was scaled."""
    return model.original_max_position_embeddings or model.max_position_embeddings or model.seq_length


def rope_attention_factor(model: ModelConfig) -> float:
    """What scaled RoPE multiplies rotated queries and keys by.

    YaRN (Peng et al. 2023, equation 22) and LongRoPE (Ding et al. 2024, section 3.3), as `transformers` computes them
    from the scaling's factor.
    """
    if model.rope_scaling_type not in ("yarn", "longrope"):
        return 1.0
    if model.rope_attention_factor is not None:
        return model.rope_attention_factor
    if model.rope_scaling_type == "yarn":
        return 0.1 * math.log(model.rope_scaling_factor or 1.0) + 1.0
    original = original_length(model)
    factor = model.rope_scaling_factor or (model.max_position_embeddings or model.seq_length) / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
