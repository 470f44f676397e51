"""Where documents begin inside samples: position ids, and cumulative lengths for attention.

A document ends with its end-of-document token, as in Megatron; the token after it begins another one. A sample's first
token also begins a document, whatever precedes it in the file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp8.config.schema import DataConfig
from megatron_fp8.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class DocumentRules:
    """What happens after an end-of-document token inside a sample, as Megatron's switches of these names say.

    `reset_position_ids`: positions count from 0 again. `reset_attention_mask`: no later token attends to it or before.
    """

    eod_id: int
    reset_position_ids: bool
    reset_attention_mask: bool


def document_rules(data: DataConfig, tokenizer: Tokenizer | None = None) -> DocumentRules | None:
    """The rules of `data.reset_position_ids` and `data.reset_attention_mask`; None if neither is set.

    `tokenizer`: whose `eod_id` ends documents; None: that of `data`, loaded only if needed. Raises TokenizerError.
    """
    if not (data.reset_position_ids or data.reset_attention_mask):
        return None
    eod_id = (tokenizer or Tokenizer.of(data)).eod_id
    return DocumentRules(eod_id, data.reset_position_ids, data.reset_attention_mask)


def document_positions(tokens: Tensor, eod_id: int) -> Tensor:
    """Position of each token in its document, int64 `[..., s]` for `tokens` `[..., s]`."""
    places = torch.arange(tokens.shape[-1], device=tokens.device)
    begins = torch.where(_begins(tokens, eod_id), places, 0)
    return places - begins.cummax(dim=-1).values


def cumulative_lengths(tokens: Tensor, eod_id: int) -> Tensor:
    """Where documents begin and end in the concatenated samples `tokens` `[b, s]`: int32 `[n + 1]`.

    n, the number of documents, is rounded up to a power of two with empty ones at the end: Transformer Engine selects
    an attention kernel for every new n.
    """
    begins = _begins(tokens, eod_id).flatten().nonzero().flatten()
    num_documents = 1 << (len(begins) - 1).bit_length()
    ends = begins.new_full((num_documents + 1 - len(begins),), tokens.numel())
    return torch.cat((begins, ends)).to(torch.int32)


def _begins(tokens: Tensor, eod_id: int) -> Tensor:
    """Bool, true at the first token of a document."""
    begins = torch.ones_like(tokens, dtype=torch.bool)
    begins[..., 1:] = tokens[..., :-1] == eod_id
    return begins
