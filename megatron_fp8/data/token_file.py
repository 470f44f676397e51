"""Reads Megatron's token-file format: `PREFIX.bin` holds token ids, `PREFIX.idx` the place of each document.

Layout of `.idx`, little-endian: 9 bytes magic; uint64 version (1); uint8 dtype code; uint64 number of
sequences; uint64 number of document marks; int32 length in tokens of each sequence; int64 byte offset of each
sequence; int64 document marks (index of each document's first sequence, then the number of sequences).
Here a document is one sequence, as Megatron's own preprocessing writes them for GPT. Imports no torch.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from glob import escape
from pathlib import Path

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
    """A token file cannot be read as one; the message names the file and what is wrong."""


class ShortenedFileError(BadInputError):
    """A file was truncated while a run reads it; the message names it."""


@dataclass(frozen=True)
class TokenIndex:
    """The content of an `.idx` file, not yet compared with its `.bin`."""

    dtype: np.dtype
    lengths_tokens: NDArray[np.int32]
    """Tokens of each sequence, [num_sequences]."""
    offsets_bytes: NDArray[np.int64]
    """Where each sequence starts in `.bin`, [num_sequences]."""
    document_marks: NDArray[np.int64]
    """First sequence of each document, then the number of sequences, [num_documents + 1]."""

    @property
    def num_documents(self) -> int:
        """Documents, each of one or more sequences."""
        return max(len(self.document_marks) - 1, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
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
    """The index of the token file at `prefix`, memory-mapped.

    Raises TokenFileError when the file is missing, not a Megatron index, or not as large as its header says.
    """
    path = idx_path(prefix)
    if is_missing(path):
        raise TokenFileError(f"{path} does not exist{_similar_prefixes(str(prefix))}")
    if reason := why_unreadable(path):
        raise TokenFileError(reason)
    size_bytes = path.stat().st_size
    with path.open("rb") as stream:
        header = stream.read(HEADER.size)
    if not header.startswith(MAGIC):
        raise TokenFileError(f"{path} is not a Megatron index: it starts with {header[:9]!r}, not {MAGIC!r}")
    if len(header) < HEADER.size:
        raise TokenFileError(f"{path} is truncated: {len(header)} bytes, less than its header of {HEADER.size}")
    _, version, code, num_sequences, num_marks = HEADER.unpack(header)
    if version != VERSION:
        raise TokenFileError(f"{path} has index version {version}; only version {VERSION} is supported")
    if code not in DTYPE_OF_CODE:
        raise TokenFileError(f"{path} has dtype code {code}, which is not an integer type")
    expected_bytes = HEADER.size + num_sequences * (LENGTH_DTYPE.itemsize + OFFSET_DTYPE.itemsize) + num_marks * 8
    if size_bytes != expected_bytes:
        raise TokenFileError(
            f"{path} has {size_bytes} bytes, but its header ({num_sequences} sequences, {num_marks} document "
            f"marks) implies {expected_bytes}"
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


def _similar_prefixes(prefix: str) -> str:
    """What may have been meant by a prefix without an index: a file with its suffix, or an --output-prefix."""
    bare = prefix.removesuffix(".bin").removesuffix(".idx")
    if bare != prefix and idx_path(bare).is_file():
        return f"; give the prefix without its suffix: {bare}"
    path = Path(prefix)
    found = sorted(path.parent.glob(f"{escape(path.name)}_*_document.idx"))
    return f"; did you mean {', '.join(str(file.with_suffix('')) for file in found)}?" if found else ""


class MappedFiles:
    """Files that are memory-mapped, held open to notice when one is truncated.

    Reading mapped memory beyond a file's new end kills the process (SIGBUS), without an exception or the file's name;
    checking the length costs a microsecond. A file that is removed or replaced does no harm: the mapped one stays.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        # Held open: the path may name another file later.
        self._files = [(Path(path), Path(path).open("rb")) for path in paths]  # noqa: SIM115
        self._sizes_bytes = [os.fstat(stream.fileno()).st_size for _, stream in self._files]

    @classmethod
    def under(cls, paths: Iterable[str | Path], arrays: Iterable[NDArray[np.generic]]) -> MappedFiles:
        """The files at `paths` and those that `arrays` are mapped from."""
        names = (array.filename for array in arrays if isinstance(array, np.memmap))
        return cls([*paths, *(name for name in names if isinstance(name, (str, Path)))])

    def require_whole(self) -> None:
        """Raise ShortenedFileError if a file was truncated; call before reading its memory."""
        for (path, stream), size_bytes in zip(self._files, self._sizes_bytes, strict=True):
            found_bytes = os.fstat(stream.fileno()).st_size
            if found_bytes < size_bytes:
                raise ShortenedFileError(
                    f"{path} was truncated while the run reads it: {found_bytes} of {size_bytes} bytes are left. "
                    "Another program writes to this run's data. Restore the file (check token files with "
                    "tools/data.py verify), then continue with --resume"
                )
