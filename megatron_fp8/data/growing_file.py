"""Owns a token file while it grows: what is on the disk survives the process, and growing goes on from there.

`PREFIX.incomplete.bin` holds the tokens and `PREFIX.incomplete.lengths` each document's number of them, so that memory
does not grow with the documents. Both are cut back to the last state that was noted (`progress_file`). The index is
made of the lengths at the end; a pair appears whole, as that of `token_file.TokenFileWriter`.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
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

MOST_TOKENS = 2**31 - 1
"""Of a document: lengths are int32 in the format."""
_CHUNK_DOCUMENTS = 2**20


class GrowingFileError(BadInputError):
    """A token file cannot grow further; the text says why."""


@dataclass
class GrowthState:
    """How far a token file has grown."""

    num_documents: int = 0
    num_tokens: int = 0
    open_tokens: int = 0
    """Tokens of the last document, which goes on; they are among num_tokens."""
    num_empty: int = 0
    longest_tokens: int = 0


class GrowingFile:
    """The token file at `prefix` while it is written; `state` is where it stands and where it starts."""

    def __init__(self, prefix: str, vocab_size: int, append_eod: bool, state: GrowthState) -> None:
        self.prefix = prefix
        self.dtype = token_dtype(vocab_size)
        self.state = state
        self._nothing_tokens = int(append_eod)
        self._tokens = _open_at(_tokens_path(prefix), state.num_tokens * self.dtype.itemsize)
        self._lengths = _open_at(_lengths_path(prefix), state.num_documents * LENGTH_DTYPE.itemsize)

    def add(
        self, tokens: NDArray[np.integer], lengths_tokens: list[int], continues: bool = False, open_end: bool = False
    ) -> None:
        """Append documents: their ids one after another, [sum(lengths_tokens)], in `self.dtype`.

        `continues`: the first is the rest of the document before; `open_end`: the last goes on in the next call.
        Raises GrowingFileError for a document of more tokens than the format can say.
        """
        state, lengths = self.state, list(lengths_tokens)
        if continues and lengths:
            lengths[0] += state.open_tokens
            if not open_end and lengths[0] <= self._nothing_tokens:
                # All pieces of the document gave no tokens: an end without a beginning.
                tokens = tokens[lengths.pop(0) :]
                state.num_empty += 1
            state.open_tokens = 0
        if open_end:
            state.open_tokens = lengths.pop()
        longest = max([*lengths, state.open_tokens], default=0)
        if longest > MOST_TOKENS:
            raise GrowingFileError(
                f"a document has more than {MOST_TOKENS:,} tokens, which Megatron's format cannot hold: divide the text"
            )
        state.longest_tokens = max(state.longest_tokens, *lengths, 0)
        self._tokens.write(tokens.data)
        self._lengths.write(np.array(lengths, dtype=LENGTH_DTYPE).data)
        state.num_tokens += len(tokens)
        state.num_documents += len(lengths)

    def sync(self) -> None:
        """Bring everything to the disk."""
        for stream in (self._tokens, self._lengths):
            stream.flush()
            os.fsync(stream.fileno())

    def close(self) -> None:
        """Leave the files as they are."""
        self._tokens.close()
        self._lengths.close()


def finish(prefix: str, dtype: np.dtype) -> None:
    """Make the pair of the complete files at `prefix`; may be called again after having been interrupted anywhere."""
    lengths = _lengths_path(prefix)
    if not lengths.exists():
        return
    temporary = idx_path(f"{prefix}.incomplete")
    _write_index(temporary, lengths, dtype)
    idx_path(prefix).unlink(missing_ok=True)
    if _tokens_path(prefix).exists():
        _tokens_path(prefix).replace(bin_path(prefix))
    temporary.replace(idx_path(prefix))
    lengths.unlink()


def discard(prefix: str) -> None:
    """Remove an incomplete token file."""
    for path in (_tokens_path(prefix), _lengths_path(prefix), idx_path(f"{prefix}.incomplete")):
        path.unlink(missing_ok=True)


def can_continue(prefix: str, state: GrowthState, dtype: np.dtype) -> bool:
    """Whether the files on the disk reach up to `state`."""
    sizes = {
        _tokens_path(prefix): state.num_tokens * dtype.itemsize,
        _lengths_path(prefix): state.num_documents * LENGTH_DTYPE.itemsize,
    }
    return all(path.exists() and path.stat().st_size >= size for path, size in sizes.items())


def _tokens_path(prefix: str) -> Path:
    return bin_path(f"{prefix}.incomplete")


def _lengths_path(prefix: str) -> Path:
    return Path(f"{prefix}.incomplete.lengths")


def _open_at(path: Path, size_bytes: int) -> BinaryIO:
    """A file cut back to `size_bytes`, to be appended to, and by no other process."""
    stream = path.open("ab")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.close()
        raise GrowingFileError(f"another process is writing {path}: wait for it or use another prefix") from error
    stream.truncate(size_bytes)
    return stream


def _write_index(path: Path, lengths_path: Path, dtype: np.dtype) -> None:
    """The index of documents with these lengths, in parts; each is one sequence (`token_file` has the layout)."""
    num_documents = lengths_path.stat().st_size // LENGTH_DTYPE.itemsize
    with path.open("wb") as stream, lengths_path.open("rb") as lengths:
        stream.write(HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[dtype], num_documents, num_documents + 1))
        for kind in ("lengths", "offsets"):
            lengths.seek(0)
            before = 0
            while len(part := np.frombuffer(lengths.read(_CHUNK_DOCUMENTS * 4), dtype=LENGTH_DTYPE)):
                if kind == "lengths":
                    stream.write(part.data)
                    continue
                ends = before + np.cumsum(part, dtype=OFFSET_DTYPE)
                stream.write(((ends - part) * dtype.itemsize).astype(OFFSET_DTYPE).data)
                before = int(ends[-1])
        for first in range(0, num_documents + 1, _CHUNK_DOCUMENTS):
            last = min(first + _CHUNK_DOCUMENTS, num_documents + 1)
            stream.write(np.arange(first, last, dtype=OFFSET_DTYPE).data)
        stream.flush()
        os.fsync(stream.fileno())
