"""Where attention on GPUs is not fused, and the memory that takes. Imports no torch.

Transformer Engine then computes the scores of all pairs of tokens, and keeps what autograd needs of them. Where it does
is what its `get_attention_backend` decides for an image without flash-attn; `docs/gpu.md` has its answers, which a test
holds against these.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config

_FP32_BYTES, _HALF_BYTES, _BOOL_BYTES = 4, 2, 1
# TE's kernel of the softmax takes fewer keys than this, divisible by 8, and heads and documents divisible by 4. Without
# it the softmax is torch's, in FP32.
_SOFTMAX_KEYS, _SOFTMAX_KEYS_DIVISOR, _SOFTMAX_BATCHES_DIVISOR = 16384, 8, 4


# Features of a head that cuDNN has kernels for in training: multiples of the first up to the second.
_HEAD_SIZE_DIVISOR, _LARGEST_HEAD = 8, 256


@dataclass(frozen=True)
class FusedAttention:
    """What the fused attention of a kind of GPU can do.

    `fp32`: that format. `deterministic`: a backward pass that always adds in the same order. `packed_pairs`: documents
    x heads x tokens x tokens from which on that backward pass is not used where documents are kept apart, since its
    workspace would not fit; None: it always is.
    """

    fp32: bool = False
    deterministic: bool = True
    packed_pairs: int | None = None


HOPPER_ATTENTION = FusedAttention(packed_pairs=2**30)


class Cause(Enum):
    """Why attention is not fused; the values are the keys that decide."""

    FP32 = "precision.mode"
    SOFTCAP = "model.attn_logit_softcapping"
    WINDOW_AND_DROPOUT = "model.attention_dropout"
    HEAD_SIZE = "model.kv_channels"
    SINKS = "model.softmax_type"
    DETERMINISM = "training.deterministic_mode"


@dataclass(frozen=True)
class Unfused:
    """Attention that is not fused with more than `beyond` documents in a micro-batch.

    `is_certain`: every micro-batch has more. Else the data decide.
    """

    beyond: int
    is_certain: bool
    cause: Cause


def unfused_attention(config: Config, layout: Layout, fused: FusedAttention) -> Unfused | None:
    """Where attention is not fused; None: nowhere."""
    cause = _cause_in_model(config, layout, fused)
    if cause is not None:
        return Unfused(0, is_certain=True, cause=cause)
    if not config.training.deterministic_mode:
        return None
    if not fused.deterministic:
        return Unfused(0, is_certain=True, cause=Cause.DETERMINISM)
    if not config.data.reset_attention_mask or fused.packed_pairs is None:
        return None
    pairs = layout.attention_heads_per_rank * layout.seq_length**2
    # The power of two that documents are rounded up to, with which the limit is reached.
    documents = _power_of_two(-(-fused.packed_pairs // pairs))
    beyond = documents // 2
    if beyond >= layout.tokens_per_microbatch:
        return None
    return Unfused(beyond, is_certain=beyond < layout.micro_batch_size, cause=Cause.DETERMINISM)


def _cause_in_model(config: Config, layout: Layout, fused: FusedAttention) -> Cause | None:
    """What cuDNN has no kernel for, or Transformer Engine never gives to one; None: nothing."""
    model = config.model
    has_sinks = model.softmax_type != "vanilla"
    causes = {
        Cause.FP32: config.precision.mode == "fp32" and not fused.fp32,
        Cause.SOFTCAP: model.attn_logit_softcapping is not None,
        Cause.WINDOW_AND_DROPOUT: model.window_size is not None and model.attention_dropout > 0,
        Cause.HEAD_SIZE: layout.kv_channels % _HEAD_SIZE_DIVISOR != 0 or layout.kv_channels > _LARGEST_HEAD,
        Cause.SINKS: has_sinks and (config.data.reset_attention_mask or config.training.deterministic_mode),
    }
    return next((cause for cause, holds in causes.items() if holds), None)


def in_documents(count: int) -> str:
    """In words."""
    return f"{count} document{'' if count == 1 else 's'}"


def score_tensor_bytes(config: Config, layout: Layout, documents: int = 0) -> float:
    """Bytes of one tensor `[documents, heads of a rank, s, s]` in the format of the parameters.

    Of samples where documents are not kept apart. Each document is padded to the sample's length, and their number
    rounded up to a power of two (`data/documents.py`). Only the data say how many there are: one a sample, the least,
    where `documents` is not given.
    """
    size = _FP32_BYTES if config.precision.mode == "fp32" else _HALF_BYTES
    return float(_batch(config, layout, documents) * layout.attention_heads_per_rank * layout.seq_length**2 * size)


def kept_score_bytes(config: Config, layout: Layout, mask_bytes: int = 1, documents: int = 0) -> float:
    """Bytes of `[s, s]` tensors that unfused attention keeps of a layer and micro-batch for the backward pass.

    The softmax's result, in FP32 where torch computes it, and what the values are multiplied by: the same tensor, a
    copy in which padding is masked where documents are kept apart, or one that dropout has thinned out; of a soft cap
    the capped scores. Of dropout the
    mask besides, `mask_bytes` an element, and of documents kept apart theirs, which all heads share. `documents`: as
    `score_tensor_bytes` takes it.
    """
    batch, heads, s = _batch(config, layout, documents), layout.attention_heads_per_rank, layout.seq_length
    apart, dropout = config.data.reset_attention_mask, bool(config.model.attention_dropout)
    tensor = score_tensor_bytes(config, layout, documents)
    elements = float(batch * heads * s**2)
    softmax_size = _HALF_BYTES if _has_softmax_kernel(config, batch * heads, s) else _FP32_BYTES
    is_cast = softmax_size * elements != tensor
    # With windows or sinks the mask of documents is part of theirs.
    is_masked = apart and config.model.window_size is None and config.model.softmax_type == "vanilla"
    kept = softmax_size * elements + (tensor if is_masked or dropout or is_cast else 0.0)
    kept += tensor if config.model.attn_logit_softcapping is not None else 0.0
    kept += mask_bytes * elements if dropout else 0.0
    return kept + (_BOOL_BYTES * batch * s**2 if apart else 0)


def _has_softmax_kernel(config: Config, batches: int, keys: int) -> bool:
    """TE's `FusedScaleMaskSoftmax.is_kernel_available`, for samples that have more than 16 tokens."""
    return (
        config.precision.mode != "fp32"
        # With sinks there is one key more.
        and config.model.softmax_type == "vanilla"
        and keys < _SOFTMAX_KEYS
        and keys % _SOFTMAX_KEYS_DIVISOR == 0
        and batches % _SOFTMAX_BATCHES_DIVISOR == 0
    )


def _batch(config: Config, layout: Layout, documents: int) -> int:
    """Rows of scores of a micro-batch."""
    if not config.data.reset_attention_mask:
        return layout.micro_batch_size
    return _power_of_two(max(documents, layout.micro_batch_size))


def _power_of_two(number: int) -> int:
    """The smallest that is not below `number` >= 1."""
    return 1 << (number - 1).bit_length()
