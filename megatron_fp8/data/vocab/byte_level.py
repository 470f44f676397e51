"""Owns the tokenizer that needs no file: the ids 0 to 255 are bytes of UTF-8, 256 ends a document.

Megatron's `ByteLevelTokenizer` has the same ids for text, but ends documents with 0, which is also a character.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_fp8.data.cuts import ANYWHERE, Cuts
from megatron_fp8.data.vocab.backend import FlatIds

NUM_BYTES = 256


class ByteLevel:
    """A `Backend`; `eod_token` is only how the end of a document shows in decoded text."""

    def __init__(self, eod_token: str) -> None:
        self._eod_token = eod_token
        self.eod_id = NUM_BYTES
        self.vocab_size = NUM_BYTES + 1
        self.cuts: Cuts | None = ANYWHERE

    def encode(self, texts: Sequence[str]) -> FlatIds:
        """The bytes of all texts."""
        return FlatIds.of([np.frombuffer(text.encode(), dtype=np.uint8) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 show as replacement characters. Raises ValueError for an id that is no byte."""
        eod = self._eod_token.encode()
        parts = (eod if token == self.eod_id else bytes((token,)) for token in ids)
        return b"".join(parts).decode(errors="replace")
