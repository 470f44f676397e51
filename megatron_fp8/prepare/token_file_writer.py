"""Writes token files in Megatron's format (`data/token_file.py`); an interrupted writer can resume.

Megatron Core's `IndexedDatasetBuilder` writes the same bytes (a test compares them), but importing it imports
Transformer Engine, which needs a GPU or the stand-in; preparing data must work anywhere. It also keeps every document's
length in memory and cannot resume.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.data.token_file import (
    CODE_OF_DTYPE,
    HEADER,
    LENGTH_DTYPE,
    MAGIC,
    OFFSET_DTYPE,
    VERSION,
    bin_path,
    idx_path,
    token_dtype,
)
from megatron_fp8.errors import BadInputError

_CHUNK_DOCUMENTS = 2**20


class WriterBusyError(BadInputError):
    """Another process is writing the same token file."""


class TokenFileWriter:
    """Writes `PREFIX.bin` and `PREFIX.idx` document by document.

    Until it is finished, `PREFIX.incomplete.bin` holds the tokens and `PREFIX.incomplete.lengths` the length of each
    document, so memory does not grow with the file. As a context manager it finishes the pair, or after an exception
    discards it. To resume, `open` one with the `num_documents` and `num_tokens` at the time of an earlier `sync`.
    """

    def __init__(
        self,
        prefix: str | Path,
        vocab_size: int = 0,
        dtype: np.dtype | None = None,
        num_documents: int = 0,
        num_tokens: int = 0,
    ) -> None:
        """`dtype`: of the ids; None: the smallest for `vocab_size`."""
        self.prefix = prefix
        self.dtype = dtype if dtype is not None else token_dtype(vocab_size)
        self.num_documents = num_documents
        self.num_tokens = num_tokens

    def open(self) -> None:
        """Open both files and drop what lies beyond the start. Raises WriterBusyError."""
        tokens_path, lengths_path = _unfinished(self.prefix)
        self._tokens = _open_at(tokens_path, self.num_tokens * self.dtype.itemsize)
        self._lengths = _open_at(lengths_path, self.num_documents * LENGTH_DTYPE.itemsize)

    def add_documents(self, tokens: NDArray[np.integer], lengths_tokens: list[int]) -> None:
        """Append documents: their concatenated ids, [sum(lengths_tokens)], in `self.dtype`.

        Raises ValueError for another dtype or number of ids: ids must not wrap around silently.
        """
        if tokens.dtype != self.dtype or len(tokens) != sum(lengths_tokens):
            raise ValueError(
                f"{len(tokens)} ids of {tokens.dtype} for documents of {sum(lengths_tokens)} ids of {self.dtype}"
            )
        self._tokens.write(tokens.data)
        self._lengths.write(np.array(lengths_tokens, dtype=LENGTH_DTYPE).data)
        self.num_tokens += len(tokens)
        self.num_documents += len(lengths_tokens)

    def sync(self) -> None:
        """Flush everything to the disk."""
        for stream in (self._tokens, self._lengths):
            stream.flush()
            os.fsync(stream.fileno())

    def close(self) -> None:
        """Close the files and keep them, for `finish` or to resume."""
        self._tokens.close()
        self._lengths.close()

    def __enter__(self) -> TokenFileWriter:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is not None:
            discard(self.prefix)
        else:
            finish(self.prefix, self.dtype)


def finish(prefix: str | Path, dtype: np.dtype) -> None:
    """Turn the written files into the pair; may be called again after an interruption at any point.

    The old `.idx` is removed first and the new one comes last, so that an index never stands beside another file's
    tokens.
    """
    tokens, lengths = _unfinished(prefix)
    if not lengths.exists():
        return
    temporary = idx_path(f"{prefix}.incomplete")
    _write_index(temporary, lengths, dtype)
    idx_path(prefix).unlink(missing_ok=True)
    if tokens.exists():
        tokens.replace(bin_path(prefix))
    temporary.replace(idx_path(prefix))
    lengths.unlink()


def discard(prefix: str | Path) -> None:
    """Remove an unfinished token file."""
    for path in (*_unfinished(prefix), idx_path(f"{prefix}.incomplete")):
        path.unlink(missing_ok=True)


def can_resume(prefix: str | Path, dtype: np.dtype, num_documents: int, num_tokens: int) -> bool:
    """Whether the unfinished files hold at least this much."""
    sizes_bytes = num_tokens * dtype.itemsize, num_documents * LENGTH_DTYPE.itemsize
    found = zip(_unfinished(prefix), sizes_bytes, strict=True)
    return all(path.exists() and path.stat().st_size >= size for path, size in found)


def _unfinished(prefix: str | Path) -> tuple[Path, Path]:
    """The files of tokens and of lengths."""
    return bin_path(f"{prefix}.incomplete"), Path(f"{prefix}.incomplete.lengths")


def _open_at(path: Path, size_bytes: int) -> BinaryIO:
    """The file, truncated to `size_bytes` and locked, to append to."""
    stream = path.open("ab")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.close()
        raise WriterBusyError(f"another process is writing {path}: wait for it or use another prefix") from error
    stream.truncate(size_bytes)
    return stream


def _write_index(path: Path, lengths_path: Path, dtype: np.dtype) -> None:
    """The index of documents of these lengths, written in chunks; each document is one sequence."""
    num_documents = lengths_path.stat().st_size // LENGTH_DTYPE.itemsize
    with path.open("wb") as stream, lengths_path.open("rb") as lengths:
        stream.write(HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[dtype], num_documents, num_documents + 1))
        while content := lengths.read(_CHUNK_DOCUMENTS * LENGTH_DTYPE.itemsize):
            stream.write(content)
        lengths.seek(0)
        before = 0
        while content := lengths.read(_CHUNK_DOCUMENTS * LENGTH_DTYPE.itemsize):
            part = np.frombuffer(content, dtype=LENGTH_DTYPE)
            ends = before + np.cumsum(part, dtype=OFFSET_DTYPE)
            stream.write(((ends - part) * dtype.itemsize).astype(OFFSET_DTYPE).data)
            before = int(ends[-1])
        for first in range(0, num_documents + 1, _CHUNK_DOCUMENTS):
            last = min(first + _CHUNK_DOCUMENTS, num_documents + 1)
            stream.write(np.arange(first, last, dtype=OFFSET_DTYPE).data)
        stream.flush()
        os.fsync(stream.fileno())
