"""Makes `tokenizer.json` files: trains a byte-level BPE, or converts GPT-2's vocabulary and merges."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from megatron_fp8.data.tokenizer import END_OF_DOCUMENT, Tokenizer, TokenizerError
from megatron_fp8.data.tokenizer_kinds import NUM_BYTES
from megatron_fp8.prepare.encode import Settings, texts_of
from megatron_fp8.prepare.input_files import InputFile
from megatron_fp8.prepare.text_blocks import read_blocks

MAX_TRAINING_BYTES = 2**30
MIN_VOCAB_SIZE = NUM_BYTES + 1


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> Tokenizer:
    """Train a byte-level BPE (split into words as GPT-2 does) on `texts`, write it to `path` and load it.

    Deterministic. A corpus with too few pairs to merge gives fewer tokens. Memory grows with the number of different
    words. Raises ValueError for a `vocab_size` too small for 256 bytes and `<|endoftext|>`.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size {vocab_size} is below {MIN_VOCAB_SIZE}: 256 bytes and {END_OF_DOCUMENT}")
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    _save(tokenizer, Path(path))
    return Tokenizer.load(path)


def train_on_files(
    files: Sequence[InputFile],
    settings: Settings,
    vocab_size: int,
    path: Path,
    max_bytes: int = MAX_TRAINING_BYTES,
    on_progress: Callable[[int], None] | None = None,
) -> Tokenizer:
    """`train_bpe` on about `max_bytes` of the texts under all keys, spread evenly over the inputs.

    `on_progress` gets the number of stored bytes that have been passed. Raises BrokenLineError and InputError too.
    """
    return train_bpe(_evenly_spread_texts(files, settings, max_bytes, on_progress), vocab_size, path)


def _evenly_spread_texts(
    files: Sequence[InputFile], settings: Settings, max_bytes: int, on_progress: Callable[[int], None] | None
) -> Iterator[str]:
    total_bytes = max(sum(file.size_bytes for file in files), 1)
    taken_bytes = 0
    for block in read_blocks(files, settings.keys):
        if on_progress is not None:
            on_progress(block.done_bytes)
        # Taken in proportion to the share of the inputs that has been passed.
        if taken_bytes * total_bytes > max_bytes * block.done_bytes:
            continue
        taken_bytes += block.size_bytes
        for texts in texts_of(block, settings)[0].values():
            yield from texts


def convert_gpt2_files(vocabulary: Path, merges: Path, eod_token: str | None, path: Path) -> None:
    """Write GPT-2's vocabulary and merges as a `tokenizer.json` to `path`; `eod_token` becomes special.

    `eod_token` None: `<|endoftext|>`. An existing file with the same content is kept. Raises TokenizerError for other
    inputs, and if `path` exists and holds something else.
    """
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the library raises a bare Exception for every kind of error
        raise TokenizerError(
            f"{vocabulary} and {merges} are not GPT-2's vocabulary and merges: {error}", "name the two complete files"
        ) from error
    tokenizer = _byte_level(model)
    name = eod_token or END_OF_DOCUMENT
    if name in tokenizer.get_vocab():
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    if not path.exists():
        _save(tokenizer, path)
        return
    existing = None
    with suppress(ValueError, OSError):
        existing = json.loads(path.read_text(encoding="utf-8"))
    if existing != json.loads(tokenizer.to_str()):
        raise TokenizerError(
            f"{path} exists and is not the tokenizer of {vocabulary} and {merges}", "name another file to write"
        )


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _save(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
    temporary = Path(f"{path}.incomplete")
    tokenizer.save(str(temporary))
    temporary.replace(path)
