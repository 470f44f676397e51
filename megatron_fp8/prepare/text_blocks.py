"""Reads the inputs in blocks, from any position; memory is bounded by the block and the longest text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Literal

import pyarrow
import pyarrow.parquet

from megatron_fp8.prepare.input_files import JSONL, PARQUET, InputError, InputFile, Stream

BLOCK_BYTES = 2**20
MAX_TEXT_BYTES = 2**26
"""Of a line or a text file. A text is encoded in one call, in which libraries take over a hundred times its size."""
_MAX_ROWS = 10_000


@dataclass(frozen=True)
class Position:
    """A position between two blocks."""

    file: int = 0
    """Index of the file among the inputs."""
    offset: int = 0
    """Bytes of this file's uncompressed content before it; rows of a Parquet file."""
    number: int = 1
    """Number of the next line or row."""


@dataclass(frozen=True)
class Block:
    """Consecutive texts of the inputs. `kind` says which of the three contents it has."""

    kind: Literal["lines", "rows", "files"]
    source: str
    """The file, or the first of several."""
    first_number: int
    """Line or row number of its first text."""
    end: Position
    size_bytes: int
    """Bytes of text, uncompressed."""
    done_bytes: int
    """Bytes of all inputs, as stored, that have been read after it."""
    lines: bytes = b""
    """Whole lines of JSON."""
    rows: Mapping[str, Sequence[str | bytes | None]] | None = None
    """The texts under each key; bytes where they are not UTF-8."""
    files: Sequence[tuple[str, bytes]] = ()
    """(path, content) of whole text files."""
    too_long: bool = False
    """Instead of contents: it stands for one line or file longer than `MAX_TEXT_BYTES`."""


def read_blocks(
    files: Sequence[InputFile], keys: Sequence[str], start: Position = Position(), block_bytes: int = BLOCK_BYTES
) -> Iterator[Block]:
    """The texts of `files` from `start` on, in blocks of about `block_bytes`. Raises InputError and OSError."""
    stored_before = [0, *accumulate(file.size_bytes for file in files)]
    for format_, group in groupby(range(start.file, len(files)), lambda index: files[index].format):
        here = [start if index == start.file else Position(index) for index in group]
        blocks: Iterator[Block]
        if format_ == JSONL:
            blocks = (block for at in here for block in _lines(files[at.file], at, block_bytes))
        elif format_ == PARQUET:
            blocks = (block for at in here for block in _rows(files[at.file], at, keys, block_bytes))
        else:
            blocks = _text_files(files, [at.file for at in here], block_bytes)
        for block in blocks:
            yield replace(block, done_bytes=stored_before[block.end.file] + block.done_bytes)


def _lines(file: InputFile, start: Position, block_bytes: int) -> Iterator[Block]:
    """Whole lines, in blocks that end at the end of a line."""
    offset, number = start.offset, start.number
    with Stream(file.path, offset) as stream:

        def block(lines: bytes, num_lines: int, too_long: bool = False) -> Block:
            """The next `num_lines` lines, up to `offset`."""
            nonlocal number
            first, number = number, number + num_lines
            end = Position(start.file, offset, number)
            return Block("lines", str(file.path), first, end, len(lines), stream.stored_bytes, lines, too_long=too_long)

        parts: list[bytes] = []
        size = 0
        too_long = False
        while chunk := stream.read(block_bytes):
            if too_long:
                skipped = chunk.find(b"\n") + 1 or len(chunk)
                offset += skipped
                too_long = chunk[skipped - 1 : skipped] != b"\n"
                chunk = chunk[skipped:]
                if not too_long:
                    yield block(b"", 1, too_long=True)
            cut = chunk.rfind(b"\n") + 1
            parts.append(chunk[:cut] if cut else chunk)
            size += len(parts[-1])
            if cut:
                lines = b"".join(parts)
                offset += len(lines)
                parts, size = [chunk[cut:]], len(chunk) - cut
                yield block(lines, lines.count(b"\n"))
            elif size > MAX_TEXT_BYTES:
                offset += size
                parts, size, too_long = [], 0, True
        if too_long or size:
            offset += size
            yield block(b"".join(parts), 1, too_long)


def _rows(file: InputFile, start: Position, keys: Sequence[str], block_bytes: int) -> Iterator[Block]:
    """The columns `keys`, one row group after another, each in batches of rows."""
    source = str(file.path)
    try:
        # Without a buffer the reader would load whole column chunks.
        with pyarrow.parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=2**20) as parquet:
            metadata = parquet.metadata
            row = 0
            for group in range(metadata.num_row_groups):
                num_rows = metadata.row_group(group).num_rows
                if row + num_rows <= start.offset:
                    row += num_rows
                    continue
                batch_rows = _batch_rows(metadata.row_group(group), keys, block_bytes)
                for batch in parquet.iter_batches(batch_rows, [group], list(keys), use_threads=False):
                    skipped = min(max(start.offset - row, 0), batch.num_rows)
                    row += batch.num_rows
                    if skipped == batch.num_rows:
                        continue
                    first = row - batch.num_rows + skipped + 1
                    rows = {key: _texts(batch.column(key).slice(skipped)) for key in keys}
                    end = Position(start.file, row, row + 1)
                    size = sum(batch.column(key).slice(skipped).nbytes for key in keys)
                    done = file.size_bytes * row // metadata.num_rows
                    yield Block("rows", source, first, end, size, done, rows=rows)
    except pyarrow.ArrowException as error:
        raise InputError(f"{source} is corrupt: {error}") from error


def _texts(column: pyarrow.Array) -> list[str | bytes | None]:
    """A column's values, as bytes where they are not UTF-8, which some writers do not check."""
    try:
        texts: list[str | bytes | None] = column.to_pylist()
    except UnicodeDecodeError:
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        texts = [_text_or_bytes(value) for value in column.cast(pyarrow.large_binary()).to_pylist()]
    return texts


def _text_or_bytes(value: bytes | None) -> str | bytes | None:
    try:
        return value if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def _batch_rows(group: pyarrow.parquet.RowGroupMetaData, keys: Sequence[str], block_bytes: int) -> int:
    """Rows that hold about `block_bytes` of text."""
    columns = (group.column(number) for number in range(group.num_columns))
    size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema in keys)
    num_rows: int = block_bytes * group.num_rows // max(size, 1)
    return min(max(num_rows, 1), _MAX_ROWS)


def _text_files(files: Sequence[InputFile], indices: Sequence[int], block_bytes: int) -> Iterator[Block]:
    """Whole text files, as many in a block as fit."""
    texts: list[tuple[str, bytes]] = []
    size = 0
    for index in indices:
        source = str(files[index].path)
        with Stream(files[index].path) as stream:
            text = stream.read(MAX_TEXT_BYTES + 1)
        if texts and size + len(text) > block_bytes:
            yield Block("files", texts[0][0], 1, Position(index), size, 0, files=texts)
            texts, size = [], 0
        if len(text) > MAX_TEXT_BYTES:
            yield Block("files", source, 1, Position(index + 1), 0, 0, too_long=True)
            continue
        texts.append((source, text))
        size += len(text)
    if texts:
        yield Block("files", texts[0][0], 1, Position(indices[-1] + 1), size, 0, files=texts)
