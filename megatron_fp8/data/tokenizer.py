"""Owns text to token ids and back: a byte-level BPE in a `tokenizer.json` of the `tokenizers` library.

Imports no torch, knows nothing of files of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_fp8.config.problem import BadInputError

END_OF_DOCUMENT = "<|endoftext|>"
NUM_BYTES = 256


class TokenizerError(BadInputError):
    """A tokenizer cannot be used; `reason` says why, `use_instead` what to do."""

    def __init__(self, reason: str, use_instead: str) -> None:
        super().__init__(f"{reason}; {use_instead}")
        self.reason = reason
        self.use_instead = use_instead

    def __reduce__(self) -> tuple[type[TokenizerError], tuple[str, str]]:
        """Pickled by its two texts, so that it survives the way back from a worker process."""
        return type(self), (self.reason, self.use_instead)


class Tokenizer:
    """A loaded `tokenizer.json`.

    `<|endoftext|>` inside a text is text like any other: only code that joins documents writes `eod_id`, so a
    document cannot end itself.
    """

    def __init__(self, backend: tokenizers.Tokenizer, path: str) -> None:
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        if END_OF_DOCUMENT not in vocabulary:
            special = sorted(token.content for token in backend.get_added_tokens_decoder().values())
            raise TokenizerError(
                f"{path} has no token {END_OF_DOCUMENT} to end documents with (it has {special[:10]})",
                f"add {END_OF_DOCUMENT} to its added_tokens",
            )
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.path = path
        self.eod_id: int = vocabulary[END_OF_DOCUMENT]
        # Not the number of tokens: a vocabulary may have holes, and its largest id needs an embedding row.
        self.vocab_size: int = max(vocabulary.values()) + 1

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer in the file at `path`; TokenizerError for a missing, foreign or broken file."""
        file = Path(path)
        if file.is_dir():
            raise TokenizerError(f"{path} is a directory", f"name the file: {file / 'tokenizer.json'}")
        if not file.is_file():
            raise TokenizerError(f"{path} does not exist", "name an existing tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises a bare Exception for every kind of damage
            raise TokenizerError(
                f"{path} is not a tokenizer.json of the tokenizers library: {error}",
                "name a whole file of that format (a Hugging Face fast tokenizer has one)",
            ) from error
        return cls(backend, str(path))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without an end-of-document token."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; `eod_id` shows as `<|endoftext|>`."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> Tokenizer:
    """Train a byte-level BPE (GPT-2's splitting into words) on `texts`, write it to `path`, return it.

    The same texts give the same file. A corpus too small for `vocab_size` merges gives fewer tokens.
    Raises ValueError when `vocab_size` has no room for the 256 bytes and `<|endoftext|>`.
    """
    if vocab_size < NUM_BYTES + 1:
        raise ValueError(f"vocab_size {vocab_size} is below {NUM_BYTES + 1}: 256 bytes and {END_OF_DOCUMENT} must fit")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(texts, trainer=trainer)
    temporary = Path(f"{path}.incomplete")
    backend.save(str(temporary))
    temporary.replace(path)
    return Tokenizer.load(path)
