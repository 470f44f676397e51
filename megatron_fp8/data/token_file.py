"""Owns Megatron's token-file format: `PREFIX.bin` holds token ids, `PREFIX.idx` where each document lies.

Layout of `.idx`, little-endian: 9 bytes magic; uint64 version (1); uint8 dtype code; uint64 number of
sequences; uint64 number of document marks; int32 length in tokens of each sequence; int64 byte offset of each
sequence; int64 document marks (index of each document's first sequence, then the number of sequences).
Here a document is one sequence, as Megatron's own preprocessing writes them for GPT.

Megatron Core's `IndexedDatasetBuilder` writes the same bytes (a test compares them), but importing it brings
in Transformer Engine, which needs a GPU or the stand-in; preparing data must work anywhere. Imports no torch,
knows nothing of tokenizers.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.config.paths import is_missing, why_unreadable
from megatron_fp8.errors import BadInputError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
LENGTH_DTYPE = np.dtype("<i4")
OFFSET_DTYPE = np.dtype("<i8")
# Codes of Megatron Core's `DType`; only the integer ones can hold token ids.
DTYPE_OF_CODE: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}


class TokenFileError(BadInputError):
    """A token file cannot be read as what it claims to be; the text names the file and what is wrong."""


@dataclass(frozen=True)
class TokenIndex:
    """What an `.idx` file says, not yet compared with its `.bin`."""

    dtype: np.dtype
    lengths_tokens: NDArray[np.int32]
    """Tokens of each sequence, [num_sequences]."""
    offsets_bytes: NDArray[np.int64]
    """Where each sequence starts in `.bin`, [num_sequences]."""
    document_marks: NDArray[np.int64]
    """First sequence of each document, then the number of sequences, [num_documents + 1]."""

    @property
    def num_documents(self) -> int:
        """Documents in the file."""
        return max(len(self.document_marks) - 1, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens in the file."""
        return int(self.lengths_tokens.sum(dtype=np.int64))


def bin_path(prefix: str | Path) -> Path:
    """`PREFIX.bin`."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """`PREFIX.idx`."""
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest dtype that Megatron uses for ids below `vocab_size`: uint16 below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def read_index(prefix: str | Path) -> TokenIndex:
    """The index of the token file at `prefix`. Arrays are memory-mapped.

    Raises TokenFileError when the file is missing, is no Megatron index, or has another size than its header
    asks for.
    """
    path = idx_path(prefix)
    if is_missing(path):
        raise TokenFileError(f"{path} does not exist{_neighbours(str(prefix))}")
    if reason := why_unreadable(path):
        raise TokenFileError(reason)
    size_bytes = path.stat().st_size
    with path.open("rb") as stream:
        header = stream.read(HEADER.size)
    if not header.startswith(MAGIC):
        raise TokenFileError(f"{path} is not a Megatron index: it starts with {header[:9]!r}, not {MAGIC!r}")
    if len(header) < HEADER.size:
        raise TokenFileError(f"{path} is cut off: {len(header)} bytes, its header alone has {HEADER.size}")
    _, version, code, num_sequences, num_marks = HEADER.unpack(header)
    if version != VERSION:
        raise TokenFileError(f"{path} has index version {version}; version {VERSION} is the one in use")
    if code not in DTYPE_OF_CODE:
        raise TokenFileError(f"{path} has dtype code {code}, which is no integer type of token ids")
    expected_bytes = HEADER.size + num_sequences * (LENGTH_DTYPE.itemsize + OFFSET_DTYPE.itemsize) + num_marks * 8
    if size_bytes != expected_bytes:
        raise TokenFileError(
            f"{path} has {size_bytes} bytes, but its header ({num_sequences} sequences, {num_marks} document "
            f"marks) asks for {expected_bytes}"
        )
    content = np.memmap(path, mode="r")
    lengths_end = HEADER.size + num_sequences * LENGTH_DTYPE.itemsize
    offsets_end = lengths_end + num_sequences * OFFSET_DTYPE.itemsize
    return TokenIndex(
        dtype=DTYPE_OF_CODE[code],
        lengths_tokens=content[HEADER.size : lengths_end].view(LENGTH_DTYPE),
        offsets_bytes=content[lengths_end:offsets_end].view(OFFSET_DTYPE),
        document_marks=content[offsets_end:].view(OFFSET_DTYPE),
    )


def _neighbours(prefix: str) -> str:
    """What a prefix without an index may have meant: a file with its suffix, or preprocessing's --output-prefix."""
    bare = prefix.removesuffix(".bin").removesuffix(".idx")
    if bare != prefix and idx_path(bare).is_file():
        return f"; a prefix has no suffix: {bare}"
    path = Path(prefix)
    found = sorted(path.parent.glob(f"{escape(path.name)}_*_document.idx"))
    return f"; there is {', '.join(str(file.with_suffix('')) for file in found)}" if found else ""


class TokenFileWriter:
    """Writes `PREFIX.bin` and `PREFIX.idx` document by document; a context manager.

    Both files are written under temporary names and appear, complete, when the block ends without an
    exception. The old `.idx` goes first and the new one comes last, so an interruption at any point leaves
    either a readable pair or one that is visibly incomplete, never an index beside another file's tokens.
    Memory: 4 bytes a document.
    """

    def __init__(self, prefix: str | Path, vocab_size: int = 0, dtype: np.dtype | None = None) -> None:
        """`dtype`: of the ids; None: the smallest for `vocab_size`."""
        self.prefix = Path(prefix)
        self.dtype = dtype if dtype is not None else token_dtype(vocab_size)
        self.num_tokens = 0
        self._lengths = array("i")
        self._temporary_bin = bin_path(f"{self.prefix}.incomplete")
        self._temporary_idx = idx_path(f"{self.prefix}.incomplete")

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return len(self._lengths)

    def __enter__(self) -> TokenFileWriter:
        self._stream = self._temporary_bin.open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        if kind is not None:
            self._temporary_bin.unlink(missing_ok=True)
            return
        self._write_index()
        idx_path(self.prefix).unlink(missing_ok=True)
        self._temporary_bin.replace(bin_path(self.prefix))
        self._temporary_idx.replace(idx_path(self.prefix))

    def add_documents(self, tokens: NDArray[np.integer], lengths_tokens: list[int]) -> None:
        """Append documents: their ids one after another, [sum(lengths_tokens)], already in `self.dtype`.

        Raises ValueError for another dtype or number of ids: ids must not wrap around silently.
        """
        if tokens.dtype != self.dtype or len(tokens) != sum(lengths_tokens):
            raise ValueError(
                f"{len(tokens)} ids of {tokens.dtype} for documents of {sum(lengths_tokens)} ids of {self.dtype}"
            )
        self._stream.write(tokens.tobytes())
        self._lengths.extend(lengths_tokens)
        self.num_tokens += len(tokens)

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32).astype(LENGTH_DTYPE)
        ends = np.cumsum(lengths, dtype=OFFSET_DTYPE)
        offsets = ((ends - lengths) * self.dtype.itemsize).astype(OFFSET_DTYPE)
        marks = np.arange(len(lengths) + 1, dtype=OFFSET_DTYPE)
        code = CODE_OF_DTYPE[self.dtype]
        with self._temporary_idx.open("wb") as stream:
            stream.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(marks)))
            for part in (lengths, offsets, marks):
                stream.write(part.tobytes())
