"""Owns what a worker does: the texts of a block, checked, to token ids. Knows neither files of tokens nor processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.data.cuts import Cuts
from megatron_fp8.data.sources.block import Block
from megatron_fp8.data.token_file import token_dtype
from megatron_fp8.data.tokenizer import Tokenizer

# Long texts are encoded in parts where they may be: some tokenizers take a hundred times a text's size in memory, and
# twice the time.
LONGEST_PIECE_CHARS = 2**15
_KEPT_BROKEN = 20


class BrokenLineError(Exception):
    """A line is no JSON object with a text under each key, a row has no text, or a file is no UTF-8."""

    def __init__(self, source: str, line_number: int | None, reason: str, missing_key: str | None = None) -> None:
        line = f", line {line_number}" if line_number is not None else ""
        super().__init__(f"{source}{line}: {reason}")
        self.source = source
        self.line_number = line_number
        self.reason = reason
        self.missing_key = missing_key

    def __reduce__(self) -> tuple[type[BrokenLineError], tuple[str, int | None, str, str | None]]:
        """Pickled by its parts, so that it survives the way back from a worker process."""
        return type(self), (self.source, self.line_number, self.reason, self.missing_key)


@dataclass(frozen=True)
class TokenizerFile:
    """How to load the tokenizer: `Tokenizer.load`'s arguments, which a process is given in the place of the object."""

    path: str | None
    tokenizer_type: str = "auto"
    eod_token: str | None = None
    tiktoken_pattern: str | None = None

    def load(self) -> Tokenizer:
        """Raises TokenizerError."""
        return Tokenizer.load(self.path, self.tokenizer_type, self.eod_token, self.tiktoken_pattern)


@dataclass(frozen=True)
class Settings:
    """What every worker must know."""

    tokenizer: TokenizerFile
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    skip_broken_lines: bool = False


@dataclass(frozen=True)
class Encoded:
    """The documents of one block under one key."""

    tokens: NDArray[np.integer]
    lengths_tokens: list[int]
    """Tokens of each document; 0 only where a document goes on in the next block or began in the one before."""
    text_bytes: int
    num_empty: int


@dataclass(frozen=True)
class EncodedBlock:
    """A block after encoding, for each key; `block` without its contents."""

    block: Block
    by_key: dict[str, Encoded]
    num_broken: int
    broken: list[BrokenLineError]
    """The first few."""


@dataclass(frozen=True)
class Texts:
    """The texts of a block under each key, all lists of the same length, and what was left out."""

    by_key: dict[str, list[str]]
    broken: list[BrokenLineError]


def encode_block(block: Block, tokenizer: Tokenizer, settings: Settings) -> EncodedBlock:
    """Encode every text. Raises BrokenLineError at the first broken one unless those are to be skipped."""
    texts = texts_of(block, settings)
    by_key = {
        key: encode_documents(values, tokenizer, settings.append_eod, block.continues, block.open_end)
        for key, values in texts.by_key.items()
    }
    return EncodedBlock(
        replace(block, lines=b"", rows=None, pieces=()), by_key, len(texts.broken), texts.broken[:_KEPT_BROKEN]
    )


def encode_documents(
    texts: Sequence[str], tokenizer: Tokenizer, append_eod: bool, continues: bool = False, open_end: bool = False
) -> Encoded:
    """Ids of `texts` one after another, each text with `eod_id` at its end where asked, in the vocabulary's dtype.

    An empty text is counted, not written: it would be an end with no beginning. `continues`: the first text is the
    rest of a document; `open_end`: the last is a document's beginning.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    if not texts:
        return Encoded(np.empty(0, dtype), [], 0, 0)
    text_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
    pieces, counts = _pieces_of(texts, tokenizer.cuts, continues)
    flat = tokenizer.encode_flat(pieces)
    lengths = flat.lengths if counts is None else np.add.reduceat(flat.lengths, np.cumsum([0, *counts])[:-1])
    is_open = np.arange(len(texts)) >= len(texts) - int(open_end)
    is_rest = np.arange(len(texts)) < int(continues)
    is_empty = (lengths == 0) & ~is_open & ~is_rest
    # All ids are below vocab_size, which the dtype is chosen for.
    tokens = flat.ids.astype(dtype, casting="unsafe", copy=False)
    if append_eod:
        has_end = ~is_open & ~is_empty
        tokens = np.insert(tokens, np.cumsum(lengths)[has_end], tokenizer.eod_id)
        lengths = lengths + has_end
    return Encoded(tokens, lengths[~is_empty].tolist(), text_bytes, int(is_empty.sum()))


def _pieces_of(texts: Sequence[str], cuts: Cuts | None, continues: bool) -> tuple[Sequence[str], list[int] | None]:
    """Texts in parts, and how many each has; None: one. `continues`: the first is the rest of a document."""
    if cuts is None:
        return texts, None
    if continues and cuts.begins_with_space:
        texts = [cuts.rest(texts[0]), *texts[1:]]
    if max(map(len, texts)) <= LONGEST_PIECE_CHARS:
        return texts, None
    parts = [list(cuts.parts(text, LONGEST_PIECE_CHARS)) for text in texts]
    return [part for of_text in parts for part in of_text], list(map(len, parts))


def texts_of(block: Block, settings: Settings) -> Texts:
    """The texts of a block. Raises BrokenLineError at the first broken one unless those are to be skipped."""
    texts = Texts({key: [] for key in settings.keys}, [])
    for record in _records(block, settings.keys):
        if isinstance(record, BrokenLineError):
            if not settings.skip_broken_lines:
                raise record
            texts.broken.append(record)
            if not (block.continues or block.open_end):
                continue
            # A part of a document is left out; that the document began before, or goes on, stays true.
            record = [""]
        for key, text in zip(settings.keys, record, strict=True):
            texts.by_key[key].append(text)
    return texts


def _records(block: Block, keys: Sequence[str]) -> Iterator[list[str] | BrokenLineError]:
    """The text under each key of each line, row or file, or why there is none."""
    if block.broken is not None:
        yield BrokenLineError(block.source, block.first_number if block.kind == "lines" else None, block.broken)
    elif block.kind == "lines":
        for number, line in enumerate(block.lines.split(b"\n"), block.first_number):
            if line and not line.isspace():
                yield _record_of_line(line, block.source, number, keys)
    elif block.kind == "rows":
        assert block.rows is not None
        for number, texts in enumerate(zip(*(block.rows[key] for key in keys), strict=True), block.first_number):
            missing = [key for key, text in zip(keys, texts, strict=True) if text is None]
            broken = [key for key, text in zip(keys, texts, strict=True) if isinstance(text, bytes)]
            if missing:
                yield BrokenLineError(block.source, number, f"{missing[0]!r} is null")
            elif broken:
                yield BrokenLineError(block.source, number, f"{broken[0]!r} is not UTF-8")
            else:
                yield [text for text in texts if isinstance(text, str)]
    else:
        for number, piece in enumerate(block.pieces):
            begins = number > 0 or not block.continues
            try:
                # As in JSON Lines, a mark at a file's beginning is not text.
                yield [piece.text.decode("utf-8-sig" if begins else "utf-8")]
            except UnicodeDecodeError as error:
                yield BrokenLineError(piece.source, None, f"not UTF-8: {error}")


def _record_of_line(line: bytes, source: str, number: int, keys: Sequence[str]) -> list[str] | BrokenLineError:
    try:
        # As text: of bytes the module would guess the encoding, for each line. A file may begin with a mark.
        record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except ValueError as error:
        return BrokenLineError(source, number, f"not JSON: {error}")
    except RecursionError:
        return BrokenLineError(source, number, "lists or objects in one another, too deep to be read")
    if not isinstance(record, dict):
        return BrokenLineError(source, number, f"a JSON {type(record).__name__}, not an object")
    for key in keys:
        if key not in record:
            return BrokenLineError(source, number, f"no key {key!r}; it has {sorted(record)}", missing_key=key)
        if not isinstance(record[key], str):
            return BrokenLineError(source, number, f"{key!r} holds {type(record[key]).__name__}, not a text")
        try:
            record[key].encode()
        except UnicodeEncodeError as error:
            # JSON can spell half of a surrogate pair, which is no character.
            return BrokenLineError(source, number, f"{key!r} is not Unicode text: {error}")
    return [record[key] for key in keys]
