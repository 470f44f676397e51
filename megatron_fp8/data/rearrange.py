"""Owns making token files of token files: several joined to one, one divided into several.

Ids are copied as they are, or into a wider dtype; in parts, so that memory stays flat. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_fp8.data.inspect import mistake_of_pair
from megatron_fp8.data.token_file import TokenFileWriter, TokenIndex, bin_path, idx_path, read_index
from megatron_fp8.errors import BadInputError

PART_BYTES = 16 * 2**20
OnBytes = Callable[[int], None]


class RearrangeError(BadInputError):
    """Token files cannot be joined or divided; the text says which and why."""


@dataclass(frozen=True)
class Share:
    """Some documents of a token file, and the prefix of the file that is made of them."""

    prefix: str
    documents: range


def merge(prefixes: Sequence[str], output: str, overwrite: bool = False, on_bytes: OnBytes | None = None) -> TokenIndex:
    """Join token files to one at `output`, in their order: the bytes that preprocessing their texts together gives.

    Files of different dtypes become the widest of them. `on_bytes` gets the number of input bytes of each part that was
    copied. Raises RearrangeError, or TokenFileError for a broken index; then nothing is written.
    """
    indices = _whole_indices(prefixes)
    _check_output(output, prefixes, overwrite)
    # The smallest that holds every id of both, which for uint16 and int32 is int32.
    dtype = np.result_type(*(index.dtype for index in indices)).newbyteorder("<")
    with TokenFileWriter(output, dtype=dtype) as writer:
        for prefix, index in zip(prefixes, indices, strict=True):
            _copy(prefix, index, range(len(index.lengths_tokens)), writer, on_bytes)
    return read_index(output)


def divide(
    prefix: str, shares: Sequence[Share], overwrite: bool = False, on_bytes: OnBytes | None = None
) -> list[TokenIndex]:
    """Write a token file for each share of the documents of `prefix`. Errors as in `merge`."""
    index = _whole_index(prefix)
    for share in shares:
        if not share.documents:
            total = len(index.lengths_tokens)
            raise RearrangeError(f"{share.prefix} would get none of the {total} documents of {prefix}; leave it out")
        _check_output(share.prefix, [prefix], overwrite)
    for share in shares:
        with TokenFileWriter(share.prefix, dtype=index.dtype) as writer:
            _copy(prefix, index, share.documents, writer, on_bytes)
    return [read_index(share.prefix) for share in shares]


def _whole_indices(prefixes: Sequence[str]) -> list[TokenIndex]:
    """Those of all pairs; all that is wrong with them is said at once."""
    indices, wrong = [], []
    for prefix in prefixes:
        try:
            indices.append(_whole_index(prefix))
        except BadInputError as error:
            wrong.append(error)
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        raise RearrangeError("\n".join(map(str, wrong)))
    return indices


def _whole_index(prefix: str) -> TokenIndex:
    """The index of a pair that belongs together."""
    index = read_index(prefix)
    mistake = mistake_of_pair(prefix, index)
    if mistake is not None:
        raise RearrangeError(mistake)
    if index.num_documents != len(index.lengths_tokens):
        raise RearrangeError(
            f"{prefix} has {index.num_documents} documents of {len(index.lengths_tokens)} sequences, as preprocessing "
            "with --split-sentences makes them; only files in which each document is one sequence can be rearranged"
        )
    return index


def _check_output(output: str, inputs: Sequence[str], overwrite: bool) -> None:
    if any(Path(output).absolute() == Path(prefix).absolute() for prefix in inputs):
        raise RearrangeError(f"{output} is read and cannot be written at the same time; use another name")
    if not Path(output).parent.is_dir():
        raise RearrangeError(f"{output}: there is no directory {Path(output).parent}; make it first")
    for path in (bin_path(output), idx_path(output)):
        if path.exists() and not overwrite:
            raise RearrangeError(f"{path} exists; use another name, or --overwrite")


def _copy(prefix: str, index: TokenIndex, documents: range, writer: TokenFileWriter, on_bytes: OnBytes | None) -> None:
    """Append documents to `writer`, some at a time."""
    lengths = index.lengths_tokens[documents.start : documents.stop]
    ends = np.cumsum(lengths, dtype=np.int64)
    if len(ends) == 0 or ends[-1] == 0:
        writer.add_documents(np.empty(0, dtype=writer.dtype), lengths.tolist())
        return
    tokens = np.memmap(bin_path(prefix), dtype=index.dtype, mode="r")
    first_token = int(index.offsets_bytes[documents.start]) // index.dtype.itemsize
    begin = done = 0
    while begin < len(lengths):
        most = done + PART_BYTES // index.dtype.itemsize
        end = max(int(np.searchsorted(ends, most, side="right")), begin + 1)
        part = tokens[first_token + done : first_token + int(ends[end - 1])]
        writer.add_documents(part.astype(writer.dtype, copy=False), lengths[begin:end].tolist())
        begin, done = end, int(ends[end - 1])
        if on_bytes is not None:
            on_bytes(part.nbytes)
