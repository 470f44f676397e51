"""Validates token files: index against data, ids against the vocabulary, ends of documents.

Imports no torch: it runs before the ranks start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.config.paths import is_missing, why_unreadable
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import DataConfig
from megatron_fp8.data.token_file import TokenFileError, TokenIndex, bin_path, read_index

READ_WHOLE_UP_TO_BYTES = 64 * 2**20
SAMPLE_BYTES = 2**20
NUM_SAMPLES = 64
RECREATE = "recreate the pair with tools/preprocess_data.py"
_MAX_DOCUMENTS = 1000
_EOD_KEYS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")


def bytes_read_for_ids(prefix: str) -> int:
    """How many bytes of a `.bin` `check_token_file` reads without `read_all`."""
    size = bin_path(prefix).stat().st_size
    return size if size <= READ_WHOLE_UP_TO_BYTES else NUM_SAMPLES * SAMPLE_BYTES


def check_token_file(
    prefix: str,
    vocab_size: int,
    key: str = "data.train_data_path",
    read_all: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> list[Problem]:
    """What is wrong with the pair `PREFIX.bin`, `PREFIX.idx`: missing, corrupt, mismatched, ids outside the vocabulary.

    Up to 64 MiB of `.bin` all ids are read; of a larger file 64 evenly spaced MiB, including the first and the last,
    unless `read_all`: another tokenizer's file shows in any of them, and a full read costs minutes. `on_bytes` gets the
    number of bytes of each part that was read.
    """
    try:
        index = read_index(prefix)
    except TokenFileError as error:
        return [Problem(key, prefix, str(error), f"name an existing prefix, or {RECREATE}")]
    reason = why_mismatched(prefix, index)
    if reason is not None:
        return [Problem(key, prefix, reason, RECREATE)]
    found = _id_outside(prefix, index, vocab_size, read_all, on_bytes)
    if found is None:
        return []
    token_id, position = found
    ends = np.cumsum(index.lengths_tokens, dtype=np.int64)
    document = int(np.searchsorted(ends, position, side="right"))
    return [
        Problem(
            key,
            prefix,
            f"it holds token id {token_id}, but the vocabulary has {vocab_size} tokens: it was made with another "
            f"tokenizer or is corrupt (token {position} of the file, in document {document})",
            "set data.tokenizer_model to the tokenizer that made the file, or recreate the file",
        )
    ]


def why_mismatched(prefix: str, index: TokenIndex) -> str | None:
    """Why `.idx` and `.bin` do not belong together, if so."""
    path = bin_path(prefix)
    if is_missing(path):
        return f"{path} does not exist, but its index does"
    if reason := why_unreadable(path):
        return reason
    lengths = index.lengths_tokens.astype(np.int64)
    if len(lengths) == 0:
        return f"{path} has no documents"
    if lengths.min() < 0:
        return f"the index of {path} has a document of {lengths.min()} tokens"
    size_bytes, expected_bytes = path.stat().st_size, index.num_tokens * index.dtype.itemsize
    if size_bytes != expected_bytes:
        relation = "truncated" if size_bytes < expected_bytes else "too long"
        return (
            f"{path} has {size_bytes} bytes, but its index implies {expected_bytes} ({index.num_tokens} tokens "
            f"of {index.dtype.name}): it is {relation}, or the index belongs to another file"
        )
    if not np.array_equal(index.offsets_bytes, (np.cumsum(lengths) - lengths) * index.dtype.itemsize):
        return f"the index of {path} is corrupt: documents are not contiguous"
    marks = index.document_marks
    if len(marks) == 0 or marks[0] != 0 or marks[-1] != len(lengths) or (np.diff(marks) < 0).any():
        return f"the index of {path} is corrupt: its document marks do not cover its sequences"
    return None


def _id_outside(
    prefix: str, index: TokenIndex, vocab_size: int, read_all: bool, on_bytes: Callable[[int], None] | None
) -> tuple[int, int] | None:
    """The first id outside the vocabulary among those that are read, and its position in the file."""
    for start, part in _parts_to_read(prefix, index.dtype, read_all):
        if len(part) and (int(part.max()) >= vocab_size or int(part.min()) < 0):
            place = int(np.flatnonzero((part >= vocab_size) | (part < 0))[0])
            return int(part[place]), start + place
        if on_bytes is not None:
            on_bytes(part.nbytes)
    return None


def _parts_to_read(prefix: str, dtype: np.dtype, read_all: bool) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """(position of the first token, tokens) of the parts of a `.bin` that are read."""
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


def check_document_ends(data: DataConfig, eod_id: int, prefixes: Iterable[str]) -> list[Problem]:
    """A problem for each file without an `eod_id` at the end of any document, if a key depends on such ends.

    Of many documents 1000, evenly spaced, are read.
    """
    keys = [f"data.{key}" for key in _EOD_KEYS if getattr(data, key)]
    if not keys:
        return []
    problems = []
    for prefix in dict.fromkeys(prefixes):
        num_documents = _documents_without_end(prefix, eod_id)
        if num_documents is not None:
            reason = (
                f"none of {num_documents} documents of {prefix} ends with the tokenizer's end-of-document token, id "
                f"{eod_id}, so the key would have no effect"
            )
            use = f"a file made with tools/preprocess_data.py --append-eod; or {' '.join(f'{k}=false' for k in keys)}"
            problems.append(Problem(keys[-1], True, reason, use))
    return problems


def _documents_without_end(prefix: str, eod_id: int) -> int | None:
    """How many documents were read if none of them ends with `eod_id`; None if one does, or if there are none."""
    index = read_index(prefix)
    lengths = index.lengths_tokens
    with_tokens = np.flatnonzero(lengths)
    if len(with_tokens) == 0:
        return None
    count = min(len(with_tokens), _MAX_DOCUMENTS)
    chosen = with_tokens[np.linspace(0, len(with_tokens) - 1, count).astype(np.int64)]
    tokens = np.memmap(bin_path(prefix), dtype=index.dtype, mode="r")
    last = index.offsets_bytes[chosen] // index.dtype.itemsize + lengths[chosen] - 1
    return None if (tokens[last] == eod_id).any() else count
