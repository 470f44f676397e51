"""Owns how many bytes of text a file's tokens stand for, which a loss per byte is divided by.

Documents are decoded whole: a token need not be whole characters. Must not know models.
"""

from __future__ import annotations

import numpy as np

from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.data.validation import WholeFile


def num_text_bytes(file: WholeFile, tokenizer: Tokenizer) -> int | None:
    """UTF-8 bytes of the documents' text, without the tokens that end them; None unless the file is read whole."""
    if file.num_counted < file.num_tokens:
        return None
    total = 0
    for document in file.each_document():
        for part in np.split(document, np.flatnonzero(document == tokenizer.eod_id)):
            ids = part[part != tokenizer.eod_id].tolist()
            total += len(tokenizer.decode(ids).encode("utf-8", "surrogatepass")) if ids else 0
    return total
