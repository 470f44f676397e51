"""Owns the unit of work: a block of an input, with the position at which reading goes on after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_fp8.errors import BadInputError

BLOCK_BYTES = 2**20


class InputError(BadInputError):
    """An input cannot be found or read; the text names it."""


@dataclass(frozen=True)
class Position:
    """A place between two blocks."""

    file: int = 0
    """Number of the file among the inputs."""
    offset: int = 0
    """Bytes of this file's text, uncompressed, that lie before it; rows of a Parquet file."""
    number: int = 1
    """Number of the line or row that comes next."""


@dataclass(frozen=True)
class Piece:
    """A text file, or a part of a long one, in UTF-8."""

    source: str
    text: bytes


@dataclass(frozen=True)
class Block:
    """Consecutive texts of the inputs. `kind` says which of the three contents it has."""

    kind: Literal["lines", "rows", "pieces"]
    source: str
    """The file, or the first of several."""
    first_number: int
    """Line or row number of its first."""
    end: Position
    size_bytes: int
    """Bytes of text, uncompressed."""
    done_bytes: int
    """Bytes of all inputs, as they are stored, that have been read after it."""
    lines: bytes = b""
    """Whole lines of JSON."""
    rows: Mapping[str, Sequence[str | bytes | None]] | None = None
    """The texts under each key; bytes where they are no UTF-8."""
    pieces: Sequence[Piece] = ()
    continues: bool = False
    """Whether its first piece goes on with a document of the block before."""
    open_end: bool = False
    """Whether its last piece's document goes on in the next block."""
    broken: str | None = None
    """Instead of contents: why the one line that this stands for is left out."""
