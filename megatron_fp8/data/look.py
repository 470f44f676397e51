"""Owns looking at token files: what one holds in numbers, and the tokens at any place of a file or of a run's order.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.data.blend import Blend
from megatron_fp8.data.split_order import build_order
from megatron_fp8.data.token_file import TokenIndex, bin_path, idx_path, read_index
from megatron_fp8.errors import BadInputError

SHARES = (0.01, 0.1, 0.5, 0.9, 0.99)


class PlaceError(BadInputError):
    """There is no such place in the file; the text says what there is."""


@dataclass(frozen=True)
class Numbers:
    """What a token file holds. Lengths in tokens; `quantiles`: the lengths below which `SHARES` of documents lie."""

    num_documents: int
    num_sequences: int
    num_tokens: int
    dtype: str
    bin_bytes: int
    idx_bytes: int
    mean: float
    quantiles: tuple[int, ...]
    longest: int
    longest_document: int
    num_empty: int
    histogram: tuple[tuple[int, int, int], ...]
    """(shortest length, longest length, documents) in powers of two, without empty documents."""


@dataclass(frozen=True)
class Piece:
    """Tokens of one document that lie together: `tokens` are those from `first` on."""

    prefix: str
    document: int
    first: int
    tokens: NDArray[np.integer]


def numbers_of(prefix: str) -> Numbers:
    """The numbers of a token file with at least one document, by its index alone."""
    index = read_index(prefix)
    lengths = index.lengths_tokens
    if len(lengths) == 0:
        raise PlaceError(f"{bin_path(prefix)} has no documents")
    longest = int(lengths.argmax())
    # A length of n bits is 2^(n-1) to 2^n - 1.
    bits = np.bincount(np.frexp(lengths[lengths > 0].astype(np.float64))[1])
    return Numbers(
        num_documents=index.num_documents,
        num_sequences=len(lengths),
        num_tokens=index.num_tokens,
        dtype=index.dtype.name,
        bin_bytes=bin_path(prefix).stat().st_size if bin_path(prefix).exists() else 0,
        idx_bytes=idx_path(prefix).stat().st_size,
        mean=index.num_tokens / len(lengths),
        quantiles=tuple(int(value) for value in np.quantile(lengths, SHARES, method="inverted_cdf")),
        longest=int(lengths[longest]),
        longest_document=longest,
        num_empty=int((lengths == 0).sum()),
        histogram=tuple((2 ** (n - 1), 2**n - 1, int(count)) for n, count in enumerate(bits) if count and n > 0),
    )


def document_piece(prefix: str, document: int, first: int, length: int) -> Piece:
    """At most `length` tokens of a document from token `first` on. Raises PlaceError where there are none."""
    index = read_index(prefix)
    if not 0 <= document < len(index.lengths_tokens):
        raise PlaceError(
            f"{prefix} has documents 0 to {len(index.lengths_tokens) - 1}; there is no document {document}"
        )
    size = int(index.lengths_tokens[document])
    if size < 0:
        raise PlaceError(f"document {document} of {prefix} has {size} tokens: its index is damaged")
    if not 0 <= first < max(size, 1):
        raise PlaceError(f"document {document} of {prefix} has {size} tokens; there is no token {first}")
    return Piece(prefix, document, first, _tokens(prefix, index, document, first, min(first + length, size)))


def position_piece(prefix: str, position: int, length: int) -> Piece:
    """At most `length` tokens from token `position` of the file on, within its document."""
    index = read_index(prefix)
    if not 0 <= position < index.num_tokens:
        raise PlaceError(f"{prefix} has {index.num_tokens} tokens; there is no token {position}")
    ends = np.cumsum(index.lengths_tokens, dtype=np.int64)
    document = int(np.searchsorted(ends, position, side="right"))
    first = position - int(ends[document] - index.lengths_tokens[document])
    return document_piece(prefix, document, first, length)


def sample_pieces(blend: Blend, seq_length: int, seed: int, number: int) -> list[Piece]:
    """The documents' parts that make up sample `number` of a run, its last label included."""
    if number < 0:
        raise PlaceError(f"there is no sample {number}: the first one is 0")
    order = build_order(blend, seq_length, seed, number + 1)
    file, sample = order.locate(number)
    of_file = order.files[file]
    assert of_file is not None
    prefix = blend.prefixes[file]
    index = read_index(prefix)
    cut = int(of_file.shuffle_index[sample])
    (place, first), (last_place, last) = of_file.sample_index[cut].tolist(), of_file.sample_index[cut + 1].tolist()
    pieces = []
    for at in range(place, last_place + 1):
        document = int(of_file.document_index[at])
        end = last + 1 if at == last_place else int(index.lengths_tokens[document])
        begin = first if at == place else 0
        if end > begin:
            pieces.append(Piece(prefix, document, begin, _tokens(prefix, index, document, begin, end)))
    return pieces


def _tokens(prefix: str, index: TokenIndex, document: int, first: int, end: int) -> NDArray[np.integer]:
    path = bin_path(prefix)
    start = int(index.offsets_bytes[document]) + first * index.dtype.itemsize
    size_bytes = (end - first) * index.dtype.itemsize
    if not path.is_file() or path.stat().st_size < start + size_bytes:
        raise PlaceError(f"{path} does not reach that far: it is missing or cut off (tools/data.py verify {prefix})")
    with path.open("rb") as stream:
        stream.seek(start)
        return np.frombuffer(stream.read(size_bytes), dtype=index.dtype)
