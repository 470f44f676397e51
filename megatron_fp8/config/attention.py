"""Owns what attention in FP32 costs on GPUs, where no kernel fuses it. Imports no torch.

Transformer Engine then computes the scores of all pairs of tokens and keeps what autograd needs of them. The CPU
stand-in fuses FP32 as well.
"""

from __future__ import annotations

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config

_FP32_BYTES = 4


def is_unfused_on_gpus(config: Config) -> bool:
    """Whether attention keeps scores of `[s, s]` on GPUs."""
    return config.precision.mode == "fp32"


def score_tensor_bytes(layout: Layout) -> float:
    """Bytes of one tensor `[b, heads of a rank, s, s]` of a micro-batch."""
    pairs = layout.micro_batch_size * layout.attention_heads_per_rank * layout.seq_length**2
    return float(pairs * _FP32_BYTES)


def kept_score_bytes(config: Config, layout: Layout, mask_bytes: int = 1) -> float:
    """Bytes of `[s, s]` tensors that unfused attention keeps of a layer and micro-batch for the backward pass.

    The softmax's result, by which also the values are multiplied; with dropout a copy that is thinned out, and the
    mask, `mask_bytes` an element. With documents apart a copy in which padding is masked, and all of it once for each
    document of a sample, since each is padded to the sample's length: how many there are, only the data say, so that
    this is the least.
    """
    copies = 1.0 + (1.0 if config.data.reset_attention_mask else 0.0)
    if config.model.attention_dropout:
        copies += 1.0 + mask_bytes / _FP32_BYTES
    return copies * score_tensor_bytes(layout)
