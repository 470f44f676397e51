"""Merges token files into one and splits one into several, in parts, so that memory stays flat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_fp8.data.check_data import why_mismatched
from megatron_fp8.data.token_file import TokenIndex, bin_path, idx_path, read_index
from megatron_fp8.errors import BadInputError
from megatron_fp8.prepare.token_file_writer import TokenFileWriter

PART_BYTES = 16 * 2**20
OnBytes = Callable[[int], None]


class MergeSplitError(BadInputError):
    """Token files cannot be merged or split; the message says which and why."""


@dataclass(frozen=True)
class Share:
    """Some documents of a token file, and the prefix of the file to write them to."""

    prefix: str
    documents: range


def merge(prefixes: Sequence[str], output: str, overwrite: bool = False, on_bytes: OnBytes | None = None) -> TokenIndex:
    """Write token files, in their order, to one at `output`: the bytes that preprocessing their texts together gives.

    Different dtypes become the widest of them. `on_bytes` gets the number of input bytes of each part that was copied.
    Raises MergeSplitError, or TokenFileError for a corrupt index, before anything is written.
    """
    indices = _whole_indices(prefixes)
    _check_output(output, prefixes, overwrite)
    # The smallest that holds all ids; for uint16 and int32 that is int32.
    dtype = np.result_type(*(index.dtype for index in indices)).newbyteorder("<")
    with TokenFileWriter(output, dtype=dtype) as writer:
        for prefix, index in zip(prefixes, indices, strict=True):
            _copy(prefix, index, range(len(index.lengths_tokens)), writer, on_bytes)
    return read_index(output)


def split(
    prefix: str, shares: Sequence[Share], overwrite: bool = False, on_bytes: OnBytes | None = None
) -> list[TokenIndex]:
    """Write a token file for each share of the documents of `prefix`. Errors as in `merge`."""
    index = _whole_index(prefix)
    for share in shares:
        if not share.documents:
            total = len(index.lengths_tokens)
            raise MergeSplitError(f"{share.prefix} would get none of the {total} documents of {prefix}; omit it")
        _check_output(share.prefix, [prefix], overwrite)
    for share in shares:
        with TokenFileWriter(share.prefix, dtype=index.dtype) as writer:
            _copy(prefix, index, share.documents, writer, on_bytes)
    return [read_index(share.prefix) for share in shares]


def _whole_indices(prefixes: Sequence[str]) -> list[TokenIndex]:
    """The indices of all pairs; everything wrong with them is reported at once."""
    indices, wrong = [], []
    for prefix in prefixes:
        try:
            indices.append(_whole_index(prefix))
        except BadInputError as error:
            wrong.append(error)
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        raise MergeSplitError("\n".join(map(str, wrong)))
    return indices


def _whole_index(prefix: str) -> TokenIndex:
    """The index of a valid pair."""
    index = read_index(prefix)
    if reason := why_mismatched(prefix, index):
        raise MergeSplitError(reason)
    if index.num_documents != len(index.lengths_tokens):
        raise MergeSplitError(
            f"{prefix} has {index.num_documents} documents of {len(index.lengths_tokens)} sequences, as made by "
            "--split-sentences; only files in which each document is one sequence are supported"
        )
    return index


def _check_output(output: str, inputs: Sequence[str], overwrite: bool) -> None:
    if any(Path(output).absolute() == Path(prefix).absolute() for prefix in inputs):
        raise MergeSplitError(f"{output} is also an input; use another name")
    if not Path(output).parent.is_dir():
        raise MergeSplitError(f"{output}: the directory {Path(output).parent} does not exist; create it first")
    for path in (bin_path(output), idx_path(output)):
        if path.exists() and not overwrite:
            raise MergeSplitError(f"{path} exists; use another name, or --overwrite")


def _copy(prefix: str, index: TokenIndex, documents: range, writer: TokenFileWriter, on_bytes: OnBytes | None) -> None:
    """Append documents to `writer`, in parts of about `PART_BYTES`."""
    lengths = index.lengths_tokens[documents.start : documents.stop]
    ends = np.cumsum(lengths, dtype=np.int64)
    if len(ends) == 0 or ends[-1] == 0:
        writer.add_documents(np.empty(0, dtype=writer.dtype), lengths.tolist())
        return
    tokens = np.memmap(bin_path(prefix), dtype=index.dtype, mode="r")
    first_token = int(index.offsets_bytes[documents.start]) // index.dtype.itemsize
    begin = done = 0
    while begin < len(lengths):
        limit = done + PART_BYTES // index.dtype.itemsize
        end = max(int(np.searchsorted(ends, limit, side="right")), begin + 1)
        part = tokens[first_token + done : first_token + int(ends[end - 1])]
        writer.add_documents(part.astype(writer.dtype, copy=False), lengths[begin:end].tolist())
        begin, done = end, int(ends[end - 1])
        if on_bytes is not None:
            on_bytes(part.nbytes)
