"""Owns JSON Lines to token files: reading, checking, encoding in worker processes, counting.

The bytes written do not depend on the number of workers: blocks of lines are encoded wherever, and written in
their order. Memory is bounded: a few blocks a worker, whatever the input's size. Imports no torch.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.data.token_file import TokenFileWriter, token_dtype
from megatron_fp8.data.tokenizer import Tokenizer

BLOCK_BYTES = 2**20
BLOCKS_AHEAD_PER_WORKER = 3
KEPT_BROKEN_LINES = 20


class BrokenLineError(Exception):
    """A line of the input is no JSON object with a text under each key."""

    def __init__(self, line_number: int, reason: str, missing_key: str | None = None) -> None:
        super().__init__(f"line {line_number}: {reason}")
        self.line_number = line_number
        self.reason = reason
        self.missing_key = missing_key

    def __reduce__(self) -> tuple[type[BrokenLineError], tuple[int, str, str | None]]:
        """Pickled by its parts, so that it survives the way back from a worker process."""
        return type(self), (self.line_number, self.reason, self.missing_key)


class NoTextError(Exception):
    """The input has no text to write: an empty token file could not be opened by anything."""


@dataclass(frozen=True)
class Settings:
    """What every worker must know."""

    tokenizer_path: str
    keys: tuple[str, ...]
    append_eod: bool
    skip_broken_lines: bool


@dataclass(frozen=True)
class Block:
    """Consecutive lines of the input."""

    first_line_number: int
    lines: list[bytes]
    size_bytes: int


@dataclass(frozen=True)
class Encoded:
    """The documents of one block under one key."""

    tokens: NDArray[np.integer]
    lengths_tokens: list[int]
    text_bytes: int
    num_empty: int


@dataclass(frozen=True)
class EncodedBlock:
    """A block after encoding, for each key."""

    size_bytes: int
    num_lines: int
    by_key: dict[str, Encoded]
    broken: list[BrokenLineError]


@dataclass
class Totals:
    """What was done, over all keys."""

    num_documents: int = 0
    num_tokens: int = 0
    text_bytes: int = 0
    num_empty: int = 0
    num_broken: int = 0
    broken: list[BrokenLineError] = field(default_factory=list)
    """The first few broken lines."""

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token; None without tokens."""
        return self.text_bytes / self.num_tokens if self.num_tokens else None

    def add(self, block: EncodedBlock) -> None:
        """Count one block in."""
        for encoded in block.by_key.values():
            self.num_documents += len(encoded.lengths_tokens)
            self.num_tokens += len(encoded.tokens)
            self.text_bytes += encoded.text_bytes
            self.num_empty += encoded.num_empty
        self.num_broken += len(block.broken)
        self.broken.extend(block.broken[: KEPT_BROKEN_LINES - len(self.broken)])


class DocumentEncoder:
    """Collects documents' ids; joins them with `eod_id` where asked."""

    def __init__(self, tokenizer: Tokenizer, append_eod: bool) -> None:
        self._tokenizer = tokenizer
        self._append_eod = append_eod
        self._ids: list[int] = []
        self._lengths: list[int] = []
        self._text_bytes = 0
        self._num_empty = 0

    def add(self, text: str) -> None:
        """Encode one document; an empty one is counted, not written: it would be an end with no beginning."""
        ids = self._tokenizer.encode(text)
        if not ids:
            self._num_empty += 1
            return
        if self._append_eod:
            ids.append(self._tokenizer.eod_id)
        self._ids.extend(ids)
        self._lengths.append(len(ids))
        self._text_bytes += len(text.encode())

    def finish(self) -> Encoded:
        """What was collected, in the dtype of the tokenizer's vocabulary."""
        tokens = np.array(self._ids, dtype=token_dtype(self._tokenizer.vocab_size))
        return Encoded(tokens, self._lengths, self._text_bytes, self._num_empty)


def texts_of_line(line: bytes, line_number: int, keys: Sequence[str]) -> list[str]:
    """The text under each key. Raises BrokenLineError."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise BrokenLineError(line_number, f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BrokenLineError(line_number, f"a JSON {type(record).__name__}, not an object")
    for key in keys:
        if key not in record:
            raise BrokenLineError(line_number, f"no key {key!r}; it has {sorted(record)}", missing_key=key)
        if not isinstance(record[key], str):
            raise BrokenLineError(line_number, f"{key!r} holds {type(record[key]).__name__}, not a text")
        try:
            record[key].encode()
        except UnicodeEncodeError as error:
            # JSON can spell half of a surrogate pair, which is no character.
            raise BrokenLineError(line_number, f"{key!r} is not Unicode text: {error}") from error
    return [record[key] for key in keys]


def encode_block(block: Block, tokenizer: Tokenizer, settings: Settings) -> EncodedBlock:
    """Encode every line. Raises BrokenLineError at the first broken one unless those are to be skipped."""
    encoders = {key: DocumentEncoder(tokenizer, settings.append_eod) for key in settings.keys}
    broken = []
    for line_number, line in enumerate(block.lines, block.first_line_number):
        if not line.strip():
            continue
        try:
            texts = texts_of_line(line, line_number, settings.keys)
        except BrokenLineError as error:
            if not settings.skip_broken_lines:
                raise
            broken.append(error)
            continue
        for encoder, text in zip(encoders.values(), texts, strict=True):
            encoder.add(text)
    by_key = {key: encoder.finish() for key, encoder in encoders.items()}
    return EncodedBlock(block.size_bytes, len(block.lines), by_key, broken)


def blocks_of(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """The lines of a file in blocks of about `block_bytes`, streaming."""
    lines: list[bytes] = []
    size_bytes = 0
    first_line_number = 1
    with path.open("rb") as stream:
        for line in stream:
            lines.append(line)
            size_bytes += len(line)
            if size_bytes >= block_bytes:
                yield Block(first_line_number, lines, size_bytes)
                first_line_number += len(lines)
                lines, size_bytes = [], 0
    if lines:
        yield Block(first_line_number, lines, size_bytes)


def output_prefix_of(output_prefix: str, key: str) -> str:
    """Prefix of the token file of one key, as Megatron's own tool names it."""
    return f"{output_prefix}_{key}_document"


def preprocess(
    input_path: Path,
    output_prefix: str,
    settings: Settings,
    num_workers: int,
    on_block: Callable[[EncodedBlock], None] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Totals:
    """Encode every line of `input_path` into one token file per key; `on_block` is called after each block.

    Raises BrokenLineError and NoTextError (nothing is written then) and what the tokenizer's loading raises.
    """
    tokenizer = Tokenizer.load(settings.tokenizer_path)
    totals = Totals()
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(TokenFileWriter(output_prefix_of(output_prefix, key), tokenizer.vocab_size))
            for key in settings.keys
        }
        blocks = blocks_of(input_path, block_bytes)
        if num_workers > 1:
            encoded_blocks = _encode_in_processes(blocks, settings, num_workers)
        else:
            encoded_blocks = (encode_block(block, tokenizer, settings) for block in blocks)
        for block in encoded_blocks:
            for key, encoded in block.by_key.items():
                writers[key].add_documents(encoded.tokens, encoded.lengths_tokens)
            totals.add(block)
            if on_block is not None:
                on_block(block)
        for key, writer in writers.items():
            if writer.num_documents == 0:
                raise NoTextError(
                    f"no text under {key!r} ({totals.num_empty} empty documents, {totals.num_broken} broken "
                    f"lines{f', the first: {totals.broken[0]}' if totals.broken else ''})"
                )
    return totals


@lru_cache(maxsize=1)
def _tokenizer_of_worker(path: str) -> Tokenizer:
    """Loaded once a process: it costs as much as encoding a block."""
    return Tokenizer.load(path)


def _encode_in_worker(block: Block, settings: Settings) -> EncodedBlock:
    return encode_block(block, _tokenizer_of_worker(settings.tokenizer_path), settings)


def _encode_in_processes(blocks: Iterator[Block], settings: Settings, num_workers: int) -> Iterator[EncodedBlock]:
    """`encode_block` in `num_workers` processes, results in order, a bounded number of blocks in flight."""
    # Spawned, not forked: the tokenizer's library keeps threads that do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        waiting: deque[Future[EncodedBlock]] = deque()
        try:
            for block in blocks:
                waiting.append(pool.submit(_encode_in_worker, block, settings))
                if len(waiting) >= num_workers * BLOCKS_AHEAD_PER_WORKER:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
