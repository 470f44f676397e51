"""Owns the check of token files before a run: is each pair whole, and do its ids fit the vocabulary?

Imports no torch, so that it runs before processes start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.config.paths import is_missing, why_unreadable
from megatron_fp8.config.problem import Problem
from megatron_fp8.data.token_file import TokenFileError, TokenIndex, bin_path, read_index

READ_WHOLE_UP_TO_BYTES = 64 * 2**20
SAMPLE_BYTES = 2**20
NUM_SAMPLES = 64
MAKE_AGAIN = "make the pair again with tools/preprocess_data.py"


@dataclass(frozen=True)
class _BadId:
    """A token id outside the vocabulary, and its place in the file."""

    token_id: int
    position: int


def bytes_read_for_ids(prefix: str) -> int:
    """How many bytes of a `.bin` `check_token_file` reads, unless it is told to read them all."""
    size = bin_path(prefix).stat().st_size
    return size if size <= READ_WHOLE_UP_TO_BYTES else NUM_SAMPLES * SAMPLE_BYTES


def check_token_file(
    prefix: str,
    vocab_size: int,
    key: str = "data.train_data_path",
    read_all: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> list[Problem]:
    """Every mistake of the pair `PREFIX.bin`, `PREFIX.idx`: missing, damaged, of two different files, with ids
    beyond `vocab_size`.

    Ids are all read up to 64 MiB of `.bin`; of a larger file 64 evenly spaced MiB are, the first and the last
    among them, unless `read_all`: a file of another tokenizer shows in any of them, a full read would cost minutes.
    `on_bytes` gets the number of bytes of each part that was read.
    """
    try:
        index = read_index(prefix)
    except TokenFileError as error:
        return [Problem(key, prefix, str(error), f"use an existing prefix, or {MAKE_AGAIN}")]
    mistake = mistake_of_pair(prefix, index)
    if mistake is not None:
        # Ids are not worth reading: where they start and end is unknown.
        return [Problem(key, prefix, mistake, MAKE_AGAIN)]
    bad = _bad_id(prefix, index, vocab_size, read_all, on_bytes)
    if bad is None:
        return []
    ends = np.cumsum(index.lengths_tokens, dtype=np.int64)
    document = int(np.searchsorted(ends, bad.position, side="right"))
    return [
        Problem(
            key,
            prefix,
            f"it holds token id {bad.token_id}, the vocabulary has {vocab_size} tokens: another tokenizer made it, or "
            f"it is damaged (token {bad.position} of the file, in document {document})",
            "set data.tokenizer_model to the tokenizer that made the file, or make the file again",
        )
    ]


def mistake_of_pair(prefix: str, index: TokenIndex) -> str | None:
    """Why `.idx` and `.bin` cannot belong together, if so."""
    path = bin_path(prefix)
    if is_missing(path):
        return f"{path} does not exist, its index does"
    if reason := why_unreadable(path):
        return reason
    lengths = index.lengths_tokens.astype(np.int64)
    if len(lengths) == 0:
        return f"{path} has no documents"
    if lengths.min() < 0:
        return f"the index of {path} has a document of {lengths.min()} tokens"
    size_bytes, expected_bytes = path.stat().st_size, index.num_tokens * index.dtype.itemsize
    if size_bytes != expected_bytes:
        relation = "cut off" if size_bytes < expected_bytes else "too long"
        return (
            f"{path} has {size_bytes} bytes, its index asks for {expected_bytes} ({index.num_tokens} tokens "
            f"of {index.dtype.name}): it is {relation}, or the index belongs to another file"
        )
    if not np.array_equal(index.offsets_bytes, (np.cumsum(lengths) - lengths) * index.dtype.itemsize):
        return f"the index of {path} is damaged: documents do not follow one another"
    marks = index.document_marks
    if len(marks) == 0 or marks[0] != 0 or marks[-1] != len(lengths) or (np.diff(marks) < 0).any():
        return f"the index of {path} is damaged: its document marks do not cover its sequences"
    return None


def _bad_id(
    prefix: str, index: TokenIndex, vocab_size: int, read_all: bool, on_bytes: Callable[[int], None] | None
) -> _BadId | None:
    """The first id outside the vocabulary in what is read."""
    for start, part in _parts_to_read(prefix, index.dtype, read_all):
        if len(part) and (int(part.max()) >= vocab_size or int(part.min()) < 0):
            place = int(np.flatnonzero((part >= vocab_size) | (part < 0))[0])
            return _BadId(int(part[place]), start + place)
        if on_bytes is not None:
            on_bytes(part.nbytes)
    return None


def _parts_to_read(prefix: str, dtype: np.dtype, read_all: bool) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """(first token, tokens) of the parts of a `.bin`."""
    if bin_path(prefix).stat().st_size == 0:
        return
    tokens = np.memmap(bin_path(prefix), dtype=dtype, mode="r")
    part_tokens = SAMPLE_BYTES // dtype.itemsize
    if read_all or tokens.nbytes <= READ_WHOLE_UP_TO_BYTES:
        starts = np.arange(0, len(tokens), part_tokens)
    else:
        starts = np.linspace(0, len(tokens) - part_tokens, NUM_SAMPLES).astype(np.int64)
    for start in starts:
        yield int(start), tokens[start : start + part_tokens]
