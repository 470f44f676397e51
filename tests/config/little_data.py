"""The smallest token files and tokenizer that a check accepts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_fp8.prepare.token_file_writer import TokenFileWriter
from megatron_fp8.prepare.train_tokenizer import train_bpe

END_OF_DOCUMENT = 256


def write_token_file(prefix: Path, num_tokens: int, vocab_size: int = 257, end: int = END_OF_DOCUMENT) -> None:
    """One document of one token, again and again, and its end."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with TokenFileWriter(prefix, vocab_size) as writer:
        tokens = np.array([*([65] * (num_tokens - 1)), end], dtype=writer.dtype)
        writer.add_documents(tokens, [num_tokens])


def write_data(directory: Path, num_tokens: int) -> None:
    """What a ready config names: text for training and validation, and the tokenizer that they were made with."""
    directory.mkdir(parents=True)
    tokenizer = train_bpe(["some text"], 300, directory / "tokenizer.json")
    for name in ("train", "valid"):
        write_token_file(directory / f"{name}_text_document", num_tokens, tokenizer.vocab_size, tokenizer.eod_id)
