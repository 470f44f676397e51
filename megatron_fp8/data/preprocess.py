"""Owns texts to token files: one pair for each key, streaming, going on where a killed process was.

The bytes written depend neither on the number of workers nor on interruptions: blocks are encoded wherever, and
written in their order. Memory is bounded: a few blocks a worker, whatever the input's size. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from megatron_fp8.data.encode import BrokenLineError, EncodedBlock, Settings
from megatron_fp8.data.growing_file import (
    GrowingFile,
    GrowthState,
    can_continue,
    discard,
    finish,
)
from megatron_fp8.data.progress_file import Progress, ProgressFile, describe_work
from megatron_fp8.data.sources.block import BLOCK_BYTES, Position
from megatron_fp8.data.sources.files import InputFile
from megatron_fp8.data.sources.reading import read_blocks
from megatron_fp8.data.token_file import bin_path, idx_path, token_dtype
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.data.worker_pool import encode_blocks

KEPT_BROKEN_LINES = 20
SAVE_EVERY_SECONDS = 10.0


class NoTextError(Exception):
    """The input has no text to write: an empty token file could not be opened by anything."""


@dataclass(frozen=True)
class Pace:
    """How work is done, which changes no bytes."""

    num_workers: int = 1
    save_every_seconds: float = SAVE_EVERY_SECONDS
    """Work that a killed process loses, at most."""
    on_start: Callable[[Totals | None], None] | None = None
    """Called once, with what an earlier process has done, if it has."""
    on_block: Callable[[EncodedBlock, Totals], None] | None = None
    """Called after each block, with all that is done."""


@dataclass(frozen=True)
class Totals:
    """What was done, over all keys."""

    num_documents: int
    num_tokens: int
    longest_tokens: int
    num_empty: int
    num_broken: int
    text_bytes: int
    broken: tuple[str, ...]
    """The first few broken lines."""

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token; None without tokens."""
        return self.text_bytes / self.num_tokens if self.num_tokens else None


def output_prefix_of(output_prefix: str, key: str) -> str:
    """Prefix of the token file of one key, as Megatron's own tool names it."""
    return f"{output_prefix}_{key}_document"


def files_to_replace(
    files: Sequence[InputFile], output_prefix: str, settings: Settings, block_bytes: int = BLOCK_BYTES
) -> list[Path]:
    """Token files that are there already, but those that a killed process of the same work had finished.

    Raises TokenizerError.
    """
    prefixes = [output_prefix_of(output_prefix, key) for key in settings.keys]
    found = [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
    if not found:
        return []
    work = describe_work(files, settings, settings.tokenizer.load(), block_bytes)
    progress = ProgressFile(output_prefix, work).read()
    return found if progress is None or not progress.all_read else []


def preprocess(
    files: Sequence[InputFile],
    output_prefix: str,
    settings: Settings,
    pace: Pace = Pace(),
    block_bytes: int = BLOCK_BYTES,
) -> Totals:
    """Encode every text of `files` into one token file per key, from the beginning or where a killed process was.

    Raises BrokenLineError and NoTextError (nothing is left then), and InputError, GrowingFileError, OSError and what
    the tokenizer's loading raises (what was written stays, and a later call goes on).
    """
    tokenizer = settings.tokenizer.load()
    note = ProgressFile(output_prefix, describe_work(files, settings, tokenizer, block_bytes))
    prefixes = {key: output_prefix_of(output_prefix, key) for key in settings.keys}
    dtype = token_dtype(tokenizer.vocab_size)
    progress = note.read()
    if progress is not None and not progress.all_read:
        known = all(can_continue(prefix, progress.by_key[key], dtype) for key, prefix in prefixes.items())
        progress = progress if known else None
    if pace.on_start is not None:
        pace.on_start(_totals(progress) if progress is not None else None)
    progress = progress or Progress(Position(), {key: GrowthState() for key in settings.keys})
    if not progress.all_read:
        try:
            _encode_rest(files, prefixes, settings, pace, block_bytes, tokenizer, note, progress)
        except (BrokenLineError, NoTextError):
            for prefix in prefixes.values():
                discard(prefix)
            note.remove()
            raise
    for prefix in prefixes.values():
        finish(prefix, dtype)
    note.remove()
    return _totals(progress)


def _encode_rest(
    files: Sequence[InputFile],
    prefixes: dict[str, str],
    settings: Settings,
    pace: Pace,
    block_bytes: int,
    tokenizer: Tokenizer,
    note: ProgressFile,
    progress: Progress,
) -> None:
    """Encode what comes after `progress`, and keep it up to date, in memory and on the disk."""
    growing: dict[str, GrowingFile] = {}
    blocks = encode_blocks(
        read_blocks(files, settings.keys, tokenizer.cuts, progress.position, block_bytes),
        tokenizer,
        settings,
        pace.num_workers,
    )
    with closing(blocks):
        try:
            for key, prefix in prefixes.items():
                growing[key] = GrowingFile(prefix, tokenizer.vocab_size, settings.append_eod, progress.by_key[key])
            if progress.position == Position():
                # The files are this process's and empty by now; another work's note would be taken for one about them.
                note.remove()
            saved_at = time.monotonic()
            for encoded in blocks:
                _add(encoded, growing, progress)
                if pace.on_block is not None:
                    pace.on_block(encoded, _totals(progress))
                if time.monotonic() - saved_at >= pace.save_every_seconds:
                    _save(growing, note, progress)
                    saved_at = time.monotonic()
            _require_text(progress)
            progress.all_read = True
            _save(growing, note, progress)
        finally:
            for file in growing.values():
                file.close()


def _add(encoded: EncodedBlock, growing: dict[str, GrowingFile], progress: Progress) -> None:
    block = encoded.block
    for key, documents in encoded.by_key.items():
        growing[key].add(documents.tokens, documents.lengths_tokens, block.continues, block.open_end)
        progress.by_key[key].num_empty += documents.num_empty
        progress.text_bytes += documents.text_bytes
    progress.position = block.end
    progress.num_broken += encoded.num_broken
    broken = (*progress.broken, *(str(error) for error in encoded.broken))
    progress.broken = broken[:KEPT_BROKEN_LINES]


def _save(growing: dict[str, GrowingFile], note: ProgressFile, progress: Progress) -> None:
    for file in growing.values():
        file.sync()
    note.write(progress)


def _require_text(progress: Progress) -> None:
    for key, state in progress.by_key.items():
        if state.num_documents == 0:
            first = f", the first: {progress.broken[0]}" if progress.broken else ""
            raise NoTextError(
                f"no text under {key!r} ({state.num_empty} empty documents, {progress.num_broken} broken lines{first})"
            )


def _totals(progress: Progress) -> Totals:
    states = progress.by_key.values()
    return Totals(
        num_documents=sum(state.num_documents for state in states),
        num_tokens=sum(state.num_tokens for state in states),
        longest_tokens=max(state.longest_tokens for state in states),
        num_empty=sum(state.num_empty for state in states),
        num_broken=progress.num_broken,
        text_bytes=progress.text_bytes,
        broken=progress.broken,
    )
