"""Encodes texts into token files, one pair per key; a killed run resumes where its last progress file says.

The bytes written depend neither on the number of workers nor on interruptions: blocks are encoded anywhere, and written
in their order. A progress file is written once the token files are on the disk; what they hold beyond it is dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter

from megatron_fp8.data.token_file import bin_path, idx_path, token_dtype
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.prepare.encode import BrokenLineError, EncodedBlock, Settings, encode_blocks
from megatron_fp8.prepare.input_files import InputFile
from megatron_fp8.prepare.text_blocks import BLOCK_BYTES, Position, read_blocks
from megatron_fp8.prepare.token_file_writer import TokenFileWriter, can_resume, discard, finish

FORMAT = 4
"""Of the progress file; incremented when it changes, or when the same work would give other bytes."""
SAVE_SECONDS = 10.0
_LIBRARIES = ("tokenizers", "sentencepiece", "tiktoken")
_KEPT_BROKEN_LINES = 20


class NoTextError(Exception):
    """The input has no text, and nothing could open an empty token file."""


@dataclass
class KeyProgress:
    """What has been written under one key."""

    num_documents: int = 0
    num_tokens: int = 0
    longest_tokens: int = 0
    num_empty: int = 0


@dataclass
class Progress:
    """What has been read and written."""

    position: Position
    by_key: dict[str, KeyProgress]
    text_bytes: int = 0
    num_broken: int = 0
    broken: tuple[str, ...] = ()
    """The first few broken lines."""
    all_read: bool = False

    @property
    def num_documents(self) -> int:
        """Documents under all keys."""
        return sum(state.num_documents for state in self.by_key.values())

    @property
    def num_tokens(self) -> int:
        """Tokens under all keys."""
        return sum(state.num_tokens for state in self.by_key.values())


@dataclass(frozen=True)
class Execution:
    """How work is done, which does not change what is written."""

    num_workers: int = 1
    save_seconds: float = SAVE_SECONDS
    """At most this much work is lost when the process is killed."""
    on_start: Callable[[Progress | None], None] | None = None
    """Called once, with the progress of an earlier process if there is one."""
    on_block: Callable[[EncodedBlock, Progress], None] | None = None
    """Called after each block."""


def output_prefix_of(output_prefix: str, key: str) -> str:
    """Prefix of the token file of one key, named as by Megatron's own tool."""
    return f"{output_prefix}_{key}_document"


def existing_outputs(output_prefix: str, keys: Sequence[str]) -> list[Path]:
    """Files of finished pairs."""
    prefixes = [output_prefix_of(output_prefix, key) for key in keys]
    return [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]


def files_to_replace(files: Sequence[InputFile], output_prefix: str, settings: Settings) -> list[Path]:
    """Finished files that preprocessing would replace; not those that the same work, killed, had just finished.

    Raises TokenizerError.
    """
    found = existing_outputs(output_prefix, settings.keys)
    if found:
        work = digest_of_work(files, settings, settings.tokenizer.load(), BLOCK_BYTES)
        progress = ProgressFile(output_prefix, work).read()
        if progress is not None and progress.all_read:
            return []
    return found


def preprocess(
    files: Sequence[InputFile],
    output_prefix: str,
    settings: Settings,
    execution: Execution = Execution(),
    block_bytes: int = BLOCK_BYTES,
) -> Progress:
    """Encode every text of `files` into one token file per key, from the start or from where a killed process was.

    Raises BrokenLineError and NoTextError, and removes what was written; raises InputError, WriterBusyError, OSError
    and what loading the tokenizer raises, and keeps it, so that a later call resumes.
    """
    tokenizer = settings.tokenizer.load()
    note = ProgressFile(output_prefix, digest_of_work(files, settings, tokenizer, block_bytes))
    prefixes = {key: output_prefix_of(output_prefix, key) for key in settings.keys}
    dtype = token_dtype(tokenizer.vocab_size)
    progress = note.read()
    if progress is not None and not progress.all_read:
        states = {prefix: progress.by_key[key] for key, prefix in prefixes.items()}
        if not all(can_resume(prefix, dtype, s.num_documents, s.num_tokens) for prefix, s in states.items()):
            progress = None
    if execution.on_start is not None:
        execution.on_start(progress)
    progress = progress or Progress(Position(), {key: KeyProgress() for key in settings.keys})
    if not progress.all_read:
        try:
            _encode_rest(files, prefixes, settings, execution, block_bytes, tokenizer, progress, note)
        except (BrokenLineError, NoTextError):
            for prefix in prefixes.values():
                discard(prefix)
            note.remove()
            raise
    for prefix in prefixes.values():
        finish(prefix, dtype)
    note.remove()
    return progress


def _encode_rest(
    files: Sequence[InputFile],
    prefixes: dict[str, str],
    settings: Settings,
    execution: Execution,
    block_bytes: int,
    tokenizer: Tokenizer,
    progress: Progress,
    note: ProgressFile,
) -> None:
    """Encode what comes after `progress`, keeping it up to date in memory and on the disk."""
    writers = {
        key: TokenFileWriter(prefixes[key], tokenizer.vocab_size, None, state.num_documents, state.num_tokens)
        for key, state in progress.by_key.items()
    }
    blocks = read_blocks(files, settings.keys, progress.position, block_bytes)
    with ExitStack() as opened:
        encoded_blocks = opened.enter_context(
            closing(encode_blocks(blocks, tokenizer, settings, execution.num_workers))
        )
        for writer in writers.values():
            writer.open()
            opened.callback(writer.close)
        if progress.position == Position():
            # Other work's progress file would be taken for one about these files, which are empty now.
            note.remove()
        saved_at = time.monotonic()
        for encoded in encoded_blocks:
            _add(encoded, writers, progress)
            if execution.on_block is not None:
                execution.on_block(encoded, progress)
            if time.monotonic() - saved_at >= execution.save_seconds:
                _save(writers, note, progress)
                saved_at = time.monotonic()
        for key, state in progress.by_key.items():
            if state.num_documents == 0:
                first = f", the first: {progress.broken[0]}" if progress.broken else ""
                raise NoTextError(
                    f"no text under {key!r} ({state.num_empty} empty documents, {progress.num_broken} broken lines"
                    f"{first})"
                )
        progress.all_read = True
        _save(writers, note, progress)


def _add(encoded: EncodedBlock, writers: dict[str, TokenFileWriter], progress: Progress) -> None:
    for key, documents in encoded.by_key.items():
        writers[key].add_documents(documents.tokens, documents.lengths_tokens)
        state = progress.by_key[key]
        state.num_documents += len(documents.lengths_tokens)
        state.num_tokens += len(documents.tokens)
        state.longest_tokens = max(state.longest_tokens, *documents.lengths_tokens, 0)
        state.num_empty += documents.num_empty
        progress.text_bytes += documents.text_bytes
    progress.position = encoded.block.end
    progress.num_broken += encoded.num_broken
    broken = (*progress.broken, *(str(error) for error in encoded.broken))
    progress.broken = broken[:_KEPT_BROKEN_LINES]


def _save(writers: dict[str, TokenFileWriter], note: ProgressFile, progress: Progress) -> None:
    for writer in writers.values():
        writer.sync()
    note.write(progress)


class ProgressFile:
    """`PREFIX.progress.json`: how far one piece of work, that is the same inputs, tokenizer and settings, has come."""

    def __init__(self, output_prefix: str, work: str) -> None:
        """`work`: `digest_of_work`'s text."""
        self._path = Path(f"{output_prefix}.progress.json")
        self._work = work

    def read(self) -> Progress | None:
        """The progress of this work; None if there is no file, or if it is of other work."""
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
            if record["work"] != self._work:
                return None
            return TypeAdapter(Progress).validate_python(record["progress"])
        except (OSError, ValueError, KeyError, TypeError):
            # A corrupt file is as good as none: start again.
            return None

    def write(self, progress: Progress) -> None:
        """Replace the file; what it says must be on the disk by now."""
        temporary = Path(f"{self._path}.incomplete")
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump({"work": self._work, "progress": asdict(progress)}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self._path)

    def remove(self) -> None:
        """The work is done or given up."""
        self._path.unlink(missing_ok=True)
        Path(f"{self._path}.incomplete").unlink(missing_ok=True)


def digest_of_work(files: Sequence[InputFile], settings: Settings, tokenizer: Tokenizer, block_bytes: int) -> str:
    """A digest of everything that decides which bytes are written; `tokenizer` is that of `settings`."""
    content = Path(tokenizer.path).read_bytes() if tokenizer.path is not None else b""
    work = {
        "format": FORMAT,
        "files": [[str(file.path), file.format, file.size_bytes, file.modified_ns] for file in files],
        "tokenizer": [tokenizer.tokenizer_type, hashlib.sha256(content).hexdigest(), tokenizer.eod_id],
        "pattern": settings.tokenizer.tiktoken_pattern,
        "settings": [settings.keys, settings.append_eod, settings.skip_broken_lines],
        "bos": tokenizer.bos_id if settings.prepend_bos else None,
        "block_bytes": block_bytes,
        "libraries": {name: version(name) for name in _LIBRARIES},
    }
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()
