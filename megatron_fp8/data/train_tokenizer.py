"""Owns training a tokenizer on the inputs of preprocessing: on all of them, or on an even share of more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_fp8.data.cuts import WORDS_AND_LINES
from megatron_fp8.data.encode import Settings, texts_of
from megatron_fp8.data.sources.files import InputFile
from megatron_fp8.data.sources.reading import read_blocks
from megatron_fp8.data.tokenizer import Tokenizer, train_bpe

MOST_TRAINING_BYTES = 2**30


def train_on_files(
    files: Sequence[InputFile],
    settings: Settings,
    vocab_size: int,
    path: Path,
    most_bytes: int = MOST_TRAINING_BYTES,
    on_progress: Callable[[int], None] | None = None,
) -> Tokenizer:
    """Train a byte-level BPE on at most about `most_bytes` of the texts under all keys and write it to `path`.

    `on_progress` gets the stored bytes of the inputs that have been passed. Raises BrokenLineError, InputError and
    what `train_bpe` raises.
    """
    return train_bpe(_texts(files, settings, most_bytes, on_progress), vocab_size, path)


def _texts(
    files: Sequence[InputFile], settings: Settings, most_bytes: int, on_progress: Callable[[int], None] | None
) -> Iterator[str]:
    total_bytes = max(sum(file.size_bytes for file in files), 1)
    taken_bytes = 0
    # What is trained splits texts there too, so that it sees the words of the whole.
    for block in read_blocks(files, settings.keys, WORDS_AND_LINES):
        if on_progress is not None:
            on_progress(block.done_bytes)
        # Blocks from all over the inputs, as many as keep pace with the share that has been passed.
        if taken_bytes * total_bytes > most_bytes * block.done_bytes:
            continue
        taken_bytes += block.size_bytes
        for texts in texts_of(block, settings).by_key.values():
            yield from texts
