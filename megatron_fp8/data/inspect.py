"""Owns the check of token files before a run: is each pair whole, and does it fit vocabulary and sequence?

Imports no torch, so that it runs before processes start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.config.problem import Problem
from megatron_fp8.data.blend import BlendError, parse_blend
from megatron_fp8.data.token_file import TokenFileError, TokenIndex, bin_path, read_index
from megatron_fp8.data.tokenizer import Tokenizer, TokenizerError

READ_WHOLE_UP_TO_BYTES = 64 * 2**20
SAMPLE_BYTES = 2**20
NUM_SAMPLES = 64
MAKE_AGAIN = "make the pair again with tools/preprocess_data.py"


def check_data_path(
    entries: Sequence[str], vocab_size: int, seq_length: int, key: str = "data.train_data_path"
) -> list[Problem]:
    """Every mistake of a list of data paths (prefixes, or a blend) and of the token files it names."""
    try:
        blend = parse_blend(entries)
    except BlendError as error:
        return [Problem(key, list(entries), error.reason, error.use_instead)]
    problems = []
    for prefix in blend.prefixes:
        problems += check_token_file(prefix, vocab_size, seq_length, key)
    return problems


def check_tokenizer(path: str, key: str = "data.tokenizer_model") -> list[Problem]:
    """The mistake of a tokenizer path, if any."""
    try:
        Tokenizer.load(path)
    except TokenizerError as error:
        return [Problem(key, path, error.reason, error.use_instead)]
    return []


def check_token_file(
    prefix: str, vocab_size: int, seq_length: int | None = None, key: str = "data.train_data_path"
) -> list[Problem]:
    """Every mistake of the pair `PREFIX.bin`, `PREFIX.idx`.

    Missing, damaged, of two different files, with ids beyond `vocab_size`, with fewer tokens than one sample
    of `seq_length` takes (None: not asked).

    Ids are all read up to 64 MiB of `.bin`; of a larger file 64 evenly spaced MiB are, the first and the last
    among them: a file of another tokenizer shows in any of them, a full read would cost minutes.
    """
    try:
        index = read_index(prefix)
    except TokenFileError as error:
        return [Problem(key, prefix, str(error), f"use an existing prefix, or {MAKE_AGAIN}")]
    mistake = _mistake_of_pair(prefix, index)
    if mistake is not None:
        # Ids are not worth reading: where they start and end is unknown.
        return [Problem(key, prefix, mistake, MAKE_AGAIN)]
    problems = []
    smallest, largest = _range_of_ids(prefix, index)
    if largest >= vocab_size or smallest < 0:
        bad = largest if largest >= vocab_size else smallest
        problems.append(
            Problem(
                key,
                prefix,
                f"it holds token id {bad}, the vocabulary has {vocab_size} tokens: another tokenizer made it",
                "set data.tokenizer_model to the tokenizer that made the file, or make the file again",
            )
        )
    if seq_length is not None and index.num_tokens < seq_length + 1:
        problems.append(
            Problem(
                key,
                prefix,
                f"it has {index.num_tokens} tokens; one sample takes seq_length + 1 = {seq_length + 1}",
                f"use more text, or model.seq_length={max(index.num_tokens - 1, 1)} or less",
            )
        )
    return problems


def _mistake_of_pair(prefix: str, index: TokenIndex) -> str | None:
    """Why `.idx` and `.bin` cannot belong together, if so."""
    path = bin_path(prefix)
    if not path.is_file():
        return f"{path} does not exist, its index does"
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


def _range_of_ids(prefix: str, index: TokenIndex) -> tuple[int, int]:
    """Smallest and largest id that was read."""
    ranges = [(int(part.min()), int(part.max())) for part in _parts_to_read(prefix, index.dtype) if len(part) > 0]
    if not ranges:
        return 0, 0
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _parts_to_read(prefix: str, dtype: np.dtype) -> Iterator[NDArray[np.integer]]:
    if bin_path(prefix).stat().st_size == 0:
        return
    tokens = np.memmap(bin_path(prefix), dtype=dtype, mode="r")
    part_tokens = SAMPLE_BYTES // dtype.itemsize
    if tokens.nbytes <= READ_WHOLE_UP_TO_BYTES:
        starts = np.arange(0, len(tokens), part_tokens)
    else:
        starts = np.linspace(0, len(tokens) - part_tokens, NUM_SAMPLES).astype(np.int64)
    for start in starts:
        yield tokens[start : start + part_tokens]
