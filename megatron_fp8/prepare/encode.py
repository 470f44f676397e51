"""Encodes blocks of texts: checks the records, and turns their texts into token ids, in worker processes.

Results come in the order of the blocks, whatever the number of processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import wait

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.data.token_file import token_dtype
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.parallel.process_environment import encode_on_one_thread
from megatron_fp8.prepare.text_blocks import MAX_TEXT_BYTES, Block

BLOCKS_AHEAD_PER_WORKER = 3
_KEPT_BROKEN = 20


class WorkerEndedError(Exception):
    """A worker process was killed; the message says why that may be."""


class BrokenLineError(Exception):
    """A line is not a JSON object with a text under each key, a row has no text, or a file is not UTF-8."""

    def __init__(self, source: str, line_number: int | None, reason: str, missing_key: str | None = None) -> None:
        # Exceptions are pickled by their arguments, in worker processes.
        super().__init__(source, line_number, reason, missing_key)
        self.source = source
        self.line_number = line_number
        self.reason = reason
        self.missing_key = missing_key

    def __str__(self) -> str:
        line = f", line {self.line_number}" if self.line_number is not None else ""
        return f"{self.source}{line}: {self.reason}"


@dataclass(frozen=True)
class TokenizerFile:
    """How to load the tokenizer: the arguments of `Tokenizer.load`, which is what worker processes are sent."""

    path: str | None
    tokenizer_type: str = "auto"
    eod_token: str | None = None
    tiktoken_pattern: str | None = None

    def load(self) -> Tokenizer:
        """Raises TokenizerError."""
        return Tokenizer.load(self.path, self.tokenizer_type, self.eod_token, self.tiktoken_pattern)


@dataclass(frozen=True)
class Settings:
    """What decides how texts become tokens."""

    tokenizer: TokenizerFile
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    skip_broken_lines: bool = False
    prepend_bos: bool = False


@dataclass(frozen=True)
class Encoded:
    """The documents of one block under one key."""

    tokens: NDArray[np.integer]
    """Concatenated, in the vocabulary's dtype."""
    lengths_tokens: list[int]
    """Tokens of each document, none of which is empty."""
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


def encode_blocks(
    blocks: Iterator[Block], tokenizer: Tokenizer, settings: Settings, num_workers: int
) -> Generator[EncodedBlock, None, None]:
    """`encode_block` of each, in order; one worker is this process. The number of blocks in memory is bounded.

    Raises WorkerEndedError when a worker is killed, and what `encode_block` raises.
    """
    if num_workers == 1:
        encode_on_one_thread()
        for block in blocks:
            yield encode_block(block, tokenizer, settings)
        return
    # Spawned, not forked: the tokenizers library has threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker) as pool:
        waiting: deque[Future[EncodedBlock]] = deque()
        try:
            for block in blocks:
                with _sigint_blocked():
                    waiting.append(pool.submit(_encode_in_worker, block, settings))
                if len(waiting) >= num_workers * BLOCKS_AHEAD_PER_WORKER:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise WorkerEndedError(
                f"one of {num_workers} encoding processes was killed, perhaps by the system for lack of memory: use "
                "fewer --workers"
            ) from error
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Workers start on submission and inherit the signal mask: Ctrl-C does not interrupt their imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    """Ignore Ctrl-C, which the parent handles, and end when the parent does."""
    encode_on_one_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@lru_cache(maxsize=1)
def _tokenizer_of_worker(file: TokenizerFile) -> Tokenizer:
    """Cached: loading takes as long as encoding a block."""
    return file.load()


def _encode_in_worker(block: Block, settings: Settings) -> EncodedBlock:
    return encode_block(block, _tokenizer_of_worker(settings.tokenizer), settings)


def encode_block(block: Block, tokenizer: Tokenizer, settings: Settings) -> EncodedBlock:
    """Encode every text. Raises BrokenLineError at the first broken record unless they are to be skipped."""
    texts, broken = texts_of(block, settings)
    by_key = {
        key: encode_documents(of_key, tokenizer, settings.append_eod, settings.prepend_bos)
        for key, of_key in texts.items()
    }
    without_contents = replace(block, lines=b"", rows=None, files=())
    return EncodedBlock(without_contents, by_key, len(broken), broken[:_KEPT_BROKEN])


def encode_documents(
    texts: Sequence[str], tokenizer: Tokenizer, append_eod: bool, prepend_bos: bool = False
) -> Encoded:
    """The concatenated ids of `texts`, in the vocabulary's dtype, each between `bos_id` and `eod_id` where asked for.

    Empty texts are counted and left out: they would be an end without a beginning.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    ids = tokenizer.encode_batch(texts)
    documents = [document for document in ids if len(document)]
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    # All ids are below vocab_size, for which the dtype is chosen.
    tokens = np.concatenate([np.empty(0, dtype), *documents], dtype=dtype, casting="unsafe")
    if append_eod:
        tokens = np.insert(tokens, np.cumsum(lengths), tokenizer.eod_id)
        lengths += 1
    if prepend_bos:
        assert tokenizer.bos_id is not None
        tokens = np.insert(tokens, np.cumsum(lengths) - lengths, tokenizer.bos_id)
        lengths += 1
    text_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
    return Encoded(tokens, lengths.tolist(), text_bytes, len(texts) - len(documents))


def texts_of(block: Block, settings: Settings) -> tuple[dict[str, list[str]], list[BrokenLineError]]:
    """The texts of a block under each key, and the broken records, the first of which is raised unless skipped."""
    records = list(_records(block, settings.keys))
    broken = [record for record in records if isinstance(record, BrokenLineError)]
    if broken and not settings.skip_broken_lines:
        raise broken[0]
    texts = [record for record in records if not isinstance(record, BrokenLineError)]
    return {key: [record[number] for record in texts] for number, key in enumerate(settings.keys)}, broken


def _records(block: Block, keys: Sequence[str]) -> Iterator[list[str] | BrokenLineError]:
    """The text under each key of each line, row or file, or why there is none."""
    if block.too_long:
        line_number = block.first_number if block.kind == "lines" else None
        reason = f"longer than {MAX_TEXT_BYTES:,} bytes; divide it into several documents"
        yield BrokenLineError(block.source, line_number, reason)
    elif block.kind == "lines":
        for number, line in enumerate(block.lines.split(b"\n"), block.first_number):
            if line and not line.isspace():
                yield _record_of_line(line, block.source, number, keys)
    elif block.kind == "rows":
        assert block.rows is not None
        for number, texts in enumerate(zip(*(block.rows[key] for key in keys), strict=True), block.first_number):
            valid = [text for text in texts if isinstance(text, str)]
            if len(valid) == len(keys):
                yield valid
                continue
            key, text = next(pair for pair in zip(keys, texts, strict=True) if not isinstance(pair[1], str))
            yield BrokenLineError(block.source, number, f"{key!r} is {'null' if text is None else 'not UTF-8'}")
    else:
        for source, content in block.files:
            try:
                # As in JSON Lines, a byte-order mark at the beginning of a file is not text.
                yield [content.decode("utf-8-sig")]
            except UnicodeDecodeError as error:
                yield BrokenLineError(source, None, f"not UTF-8: {error}")


def _record_of_line(line: bytes, source: str, number: int, keys: Sequence[str]) -> list[str] | BrokenLineError:
    try:
        # Decoded here: the json module would guess the encoding of bytes for each line.
        record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except ValueError as error:
        return BrokenLineError(source, number, f"not JSON: {error}")
    except RecursionError:
        return BrokenLineError(source, number, "JSON nested too deeply")
    if not isinstance(record, dict):
        return BrokenLineError(source, number, f"a JSON {type(record).__name__}, not an object")
    for key in keys:
        if key not in record:
            return BrokenLineError(source, number, f"no key {key!r}; it has {sorted(record)}", missing_key=key)
        if not isinstance(record[key], str):
            return BrokenLineError(source, number, f"{key!r} is {type(record[key]).__name__}, not text")
        try:
            record[key].encode()
        except UnicodeEncodeError as error:
            # JSON can hold half of a surrogate pair, which is not a character.
            return BrokenLineError(source, number, f"{key!r} is not valid Unicode: {error}")
    return [record[key] for key in keys]
