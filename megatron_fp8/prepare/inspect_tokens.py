"""Statistics of a token file, and its tokens at any position of the file or of a run's order of samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.data.blend import Blend
from megatron_fp8.data.order import build_order
from megatron_fp8.data.token_file import TokenIndex, bin_path, idx_path, read_index
from megatron_fp8.errors import BadInputError

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


class PositionError(BadInputError):
    """There is no such position; the message says which there are."""


@dataclass(frozen=True)
class Statistics:
    """Of a token file; lengths in tokens. `quantiles`: the length that `QUANTILES` of the documents do not exceed."""

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
    """Consecutive tokens of one document, from token `first` on."""

    prefix: str
    document: int
    first: int
    tokens: NDArray[np.integer]


def statistics_of(prefix: str) -> Statistics:
    """The statistics of a token file, from its index alone. Raises PositionError for one without documents."""
    index = read_index(prefix)
    lengths = index.lengths_tokens
    if len(lengths) == 0:
        raise PositionError(f"{bin_path(prefix)} has no documents")
    longest = int(lengths.argmax())
    # A length of n bits is 2^(n-1) to 2^n - 1.
    bits = np.bincount(np.frexp(lengths[lengths > 0].astype(np.float64))[1])
    return Statistics(
        num_documents=index.num_documents,
        num_sequences=len(lengths),
        num_tokens=index.num_tokens,
        dtype=index.dtype.name,
        bin_bytes=bin_path(prefix).stat().st_size if bin_path(prefix).exists() else 0,
        idx_bytes=idx_path(prefix).stat().st_size,
        mean=index.num_tokens / len(lengths),
        quantiles=tuple(int(value) for value in np.quantile(lengths, QUANTILES, method="inverted_cdf")),
        longest=int(lengths[longest]),
        longest_document=longest,
        num_empty=int((lengths == 0).sum()),
        histogram=tuple((2 ** (n - 1), 2**n - 1, int(count)) for n, count in enumerate(bits) if count and n > 0),
    )


def document_piece(prefix: str, document: int, first: int, length: int) -> Piece:
    """At most `length` tokens of a document from token `first` on. Raises PositionError if there is no such token."""
    index = read_index(prefix)
    if not 0 <= document < len(index.lengths_tokens):
        raise PositionError(
            f"{prefix} has no document {document}; its documents are 0 to {len(index.lengths_tokens) - 1}"
        )
    size = int(index.lengths_tokens[document])
    if size < 0:
        raise PositionError(f"document {document} of {prefix} has {size} tokens: its index is corrupt")
    if not 0 <= first < max(size, 1):
        raise PositionError(f"document {document} of {prefix} has no token {first}; it has {size} tokens")
    return Piece(prefix, document, first, _tokens(prefix, index, document, first, min(first + length, size)))


def position_piece(prefix: str, position: int, length: int) -> Piece:
    """At most `length` tokens from token `position` of the file on, within its document."""
    index = read_index(prefix)
    if not 0 <= position < index.num_tokens:
        raise PositionError(f"{prefix} has no token {position}; it has {index.num_tokens} tokens")
    ends = np.cumsum(index.lengths_tokens, dtype=np.int64)
    document = int(np.searchsorted(ends, position, side="right"))
    first = position - int(ends[document] - index.lengths_tokens[document])
    return document_piece(prefix, document, first, length)


def sample_pieces(blend: Blend, seq_length: int, seed: int, number: int) -> list[Piece]:
    """The parts of documents that make up sample `number` of a run, including its last label."""
    if number < 0:
        raise PositionError(f"there is no sample {number}; the first is 0")
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
        raise PositionError(f"{path} is missing or truncated; run tools/data.py verify {prefix}")
    with path.open("rb") as stream:
        stream.seek(start)
        return np.frombuffer(stream.read(size_bytes), dtype=index.dtype)
