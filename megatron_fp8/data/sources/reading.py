"""Owns reading the inputs block by block, from any position; memory is bounded by the block, not by the file.

A text is cut only where its tokenizer allows it (`cuts`), elsewhere it is one block however long. Where it is cut does
not depend on where reading began, so work that goes on later gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import pyarrow
import pyarrow.parquet

from megatron_fp8.data.cuts import Cuts
from megatron_fp8.data.sources.block import BLOCK_BYTES, Block, InputError, Piece, Position
from megatron_fp8.data.sources.files import JSONL, PARQUET, InputFile
from megatron_fp8.data.sources.stream import Stream

LONGEST_LINE_BYTES = 2**28
"""Of a line, and of a text or the part of one up to the next place where it may be cut."""
_MOST_ROWS = 10_000
_TOO_LONG = f"longer than {LONGEST_LINE_BYTES:,} bytes without a place where the tokenizer's texts may be cut"


def read_blocks(
    files: Sequence[InputFile],
    keys: Sequence[str],
    cuts: Cuts | None,
    start: Position | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[Block]:
    """The texts of `files` from `start` on, in blocks of about `block_bytes`. Raises InputError and OSError.

    `cuts`: where a long text file may be cut; None: nowhere.
    """
    start = start or Position()
    stored_before = [0, *accumulate(file.size_bytes for file in files)]
    for format_, group in groupby(range(start.file, len(files)), lambda index: files[index].format):
        here = [(index, start if index == start.file else Position(index)) for index in group]
        blocks: Iterator[Block]
        if format_ == JSONL:
            blocks = (block for index, at in here for block in _lines(files[index], at, block_bytes))
        elif format_ == PARQUET:
            blocks = (block for index, at in here for block in _rows(files[index], at, keys, block_bytes))
        else:
            blocks = _pieces(files, here, cuts, block_bytes)
        for block in blocks:
            yield replace(block, done_bytes=stored_before[block.end.file] + block.done_bytes)


def _lines(file: InputFile, start: Position, block_bytes: int) -> Iterator[Block]:
    """Whole lines, in blocks that end where a line does."""
    source = str(file.path)
    offset, number = start.offset, start.number
    with Stream(file.path, offset) as stream:

        def block(lines: bytes, num_lines: int, broken: str | None = None) -> Block:
            end = Position(start.file, offset, number)
            first = number - num_lines
            return Block("lines", source, first, end, len(lines), stream.stored_bytes, lines, broken=broken)

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
                    number += 1
                    yield block(b"", 1, f"longer than {LONGEST_LINE_BYTES:,} bytes")
            cut = chunk.rfind(b"\n") + 1
            parts.append(chunk[:cut] if cut else chunk)
            size += len(parts[-1])
            if cut:
                lines = b"".join(parts)
                offset += len(lines)
                num_lines = lines.count(b"\n")
                number += num_lines
                parts, size = [chunk[cut:]], len(chunk) - cut
                yield block(lines, num_lines)
            elif size > LONGEST_LINE_BYTES:
                offset += size
                parts, size, too_long = [], 0, True
        if too_long:
            number += 1
            yield block(b"", 1, f"longer than {LONGEST_LINE_BYTES:,} bytes")
        elif size:
            offset += size
            number += 1
            yield block(b"".join(parts), 1)


def _rows(file: InputFile, start: Position, keys: Sequence[str], block_bytes: int) -> Iterator[Block]:
    """The columns `keys`, a row group after the other, each in batches of rows."""
    source = str(file.path)
    try:
        # Without a buffer of its own the reader would take whole column chunks into memory.
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
        raise InputError(f"{source} is damaged: {error}") from error


def _texts(column: pyarrow.Array) -> list[str | bytes | None]:
    """A column's values; where one is no UTF-8, which nothing keeps a writer from, those that are not as bytes."""
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
    return min(max(block_bytes * group.num_rows // max(size, 1), 1), _MOST_ROWS)


def _pieces(
    files: Sequence[InputFile], here: Sequence[tuple[int, Position]], cuts: Cuts | None, block_bytes: int
) -> Iterator[Block]:
    """Files of text, many in a block; one that is longer than a block in several."""
    pieces: list[Piece] = []
    size = 0
    for index, start in here:
        offset = start.offset
        with Stream(files[index].path, offset) as stream:
            for text, is_last in _parts_of_text(stream, cuts, block_bytes):
                continues = offset > 0
                if pieces and (text is None or continues or size + len(text) > block_bytes or not is_last):
                    # A document in several pieces begins its own block, so that only a block's ends are open.
                    yield _piece_block(pieces, Position(index))
                    pieces, size = [], 0
                source = str(files[index].path)
                if text is None:
                    nothing = [Piece(source, b"")]
                    yield replace(_piece_block(nothing, Position(index + 1), continues), broken=_TOO_LONG)
                    break
                pieces.append(Piece(source, text))
                size += len(text)
                offset += len(text)
                if continues or not is_last:
                    end = Position(index + 1) if is_last else Position(index, offset)
                    yield _piece_block(pieces, end, continues, not is_last, 0 if is_last else stream.stored_bytes)
                    pieces, size = [], 0
    if pieces:
        yield _piece_block(pieces, Position(here[-1][0] + 1))


def _piece_block(
    pieces: Sequence[Piece], end: Position, continues: bool = False, open_end: bool = False, done_bytes: int = 0
) -> Block:
    size = sum(len(piece.text) for piece in pieces)
    return Block(
        "pieces",
        pieces[0].source,
        1,
        end,
        size,
        done_bytes,
        pieces=tuple(pieces),
        continues=continues,
        open_end=open_end,
    )


def _parts_of_text(stream: Stream, cuts: Cuts | None, part_bytes: int) -> Iterator[tuple[bytes | None, bool]]:
    """(a part, whether it is the last) of a text; an empty text is one empty part. None: a part that is too long.

    A part has at most `part_bytes` where `cuts` has a place in so many, else as many times two as it takes.
    """
    buffer, most_bytes = b"", part_bytes
    while True:
        chunks = [buffer]
        missing = most_bytes + 1 - len(buffer)
        while missing > 0 and (chunk := stream.read(min(missing, part_bytes))):
            chunks.append(chunk)
            missing -= len(chunk)
        buffer = b"".join(chunks)
        if missing > 0:
            yield buffer, True
            return
        cut = _cut_of(buffer, cuts, most_bytes) if cuts is not None else None
        if cut is not None:
            yield buffer[:cut], False
            buffer, most_bytes = buffer[cut:], part_bytes
        elif most_bytes >= LONGEST_LINE_BYTES:
            yield None, True
            return
        else:
            most_bytes = min(2 * most_bytes, LONGEST_LINE_BYTES)


def _cut_of(text: bytes, cuts: Cuts, most_bytes: int) -> int | None:
    """The last place within `most_bytes` where a longer text may be cut; None: there is none."""
    end = most_bytes
    while end > 0 and text[end] & 0xC0 == 0x80:
        end -= 1
    try:
        begin = text[:end].decode()
    except UnicodeDecodeError:
        # Such a text is refused when it is encoded, wherever it is cut.
        return max(end, 1)
    place = cuts.last(begin, 0, len(begin))
    return len(begin[:place].encode()) if place is not None else None
