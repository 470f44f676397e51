"""RoPE's angles: the frequencies of every kind of scaling, for Transformer Engine's kernels.

A run has sequences of one length, so the kinds whose frequencies depend on it (`dynamic`, `longrope`) have one set.
Formulas are those of `transformers`' `modeling_rope_utils.py`, in the same order, so that an imported model computes
the same bits. Must not know layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformer_engine.pytorch.attention import RotaryPositionEmbedding

from megatron_fp8.config.layer_kinds import original_length
from megatron_fp8.config.layout import head_size, rotary_dim
from megatron_fp8.config.schema import ModelConfig


def rotary_embedding(model: ModelConfig, local: bool = False) -> RotaryPositionEmbedding:
    """The module whose angles are `[s, 1, 1, rotary_dim]`; `local`: of layers with `rotary_base_local`."""
    embedding = RotaryPositionEmbedding(
        head_size(model),
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        interleaved=model.rotary_interleaved,
    )
    embedding.inv_freq.copy_(inverse_frequencies(model, local))
    return embedding


def inverse_frequencies(model: ModelConfig, local: bool = False) -> Tensor:
    """Radians per token of each pair of rotated features: FP32 `[rotary_dim / 2]`, on the CPU."""
    dim = rotary_dim(model)
    if local:
        assert model.rotary_base_local is not None
        return 1.0 / _wavelengths(model.rotary_base_local, dim)
    kind, factor = model.rope_scaling_type, model.rope_scaling_factor or 1.0
    plain = _wavelengths(model.rotary_base, dim)
    if kind == "linear":
        return 1.0 / plain / factor
    if kind == "dynamic":
        original = original_length(model)
        stretch = factor * max(model.seq_length, original) / original - (factor - 1)
        return 1.0 / _wavelengths(model.rotary_base * stretch ** (dim / (dim - 2)), dim)
    if kind == "llama3":
        return _llama3(1.0 / plain, model, factor)
    if kind == "yarn":
        return _yarn(plain, model, factor)
    if kind == "longrope":
        is_long = model.seq_length > original_length(model)
        divisors = model.rope_long_factor if is_long else model.rope_short_factor
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * plain)
    return 1.0 / plain


def _wavelengths(base: float, dim: int) -> Tensor:
    """Tokens per radian."""
    return base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _llama3(plain: Tensor, model: ModelConfig, factor: float) -> Tensor:
    """Low frequencies are scaled, high ones are not, those between are blended."""
    original, low, high = original_length(model), model.rope_low_freq_factor, model.rope_high_freq_factor
    wavelengths = 2 * math.pi / plain
    scaled = torch.where(wavelengths > original / low, plain / factor, plain)
    share = (original / wavelengths - low) / (high - low)
    blended = (1 - share) * scaled / factor + share * scaled
    between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(between, blended, scaled)


def _yarn(wavelengths: Tensor, model: ModelConfig, factor: float) -> Tensor:
    """Peng et al. 2023, section 3.2: as `_llama3`, with bounds in rotations over the original length."""
    dim, original = rotary_dim(model), original_length(model)

    def feature(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(model.rotary_base))

    low, high = feature(model.rope_beta_fast), feature(model.rope_beta_slow)
    if model.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
