"""Owns `tokenizer.json` files: any tokenizer of the `tokenizers` library, loaded from a path or trained on texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_fp8.data.vocab.backend import END_OF_DOCUMENT, EOD, FlatIds, TokenizerError
from megatron_fp8.data.vocab.byte_level import NUM_BYTES
from megatron_fp8.data.vocab.json_byte_pairs import JsonBytePairs
from megatron_fp8.data.vocab.json_cuts import cuts_of

# What names the end token of a tokenizer, beside its file.
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
# Of text in one call: less is encoded before anything else could be made ready.
_WORTH_CHARS = 2**16


class HuggingFace:
    """A `Backend` of a `tokenizer.json`."""

    def __init__(self, path: Path, eod_token: str | None) -> None:
        try:
            content = path.read_text(encoding="utf-8")
            self._backend = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises a bare Exception for every kind of damage
            raise TokenizerError(
                f"{path} is not a tokenizer.json of the tokenizers library: {error}", _use_instead_of(path)
            ) from error
        # Its special tokens inside a text are text like any other.
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.eod_token = _eod_token(path, vocabulary, eod_token, self._special())
        self.eod_id = vocabulary[self.eod_token]
        self.vocab_size = max(vocabulary.values()) + 1
        self._content: dict[str, Any] = json.loads(content)
        self.cuts = cuts_of(self._content)
        if self.eod_id in self._encode_by_library([self.eod_token]).ids:
            raise TokenizerError(
                f"{path} reads {self.eod_token} inside a text as the end of a document: a text could end itself",
                'give the token "special": true among its added_tokens, or name another data.eod_token',
                EOD,
            )

    def encode(self, texts: Sequence[str]) -> FlatIds:
        """Ids of all texts, without what the tokenizer would put before or after each."""
        if sum(map(len, texts)) < _WORTH_CHARS or self._byte_pairs is None:
            return self._encode_by_library(texts)
        return self._byte_pairs.encode(texts, self._encode_by_library)

    @cached_property
    def _byte_pairs(self) -> JsonBytePairs | None:
        """The same by tiktoken's core, where that is possible. Made when there is much to encode: it takes a while."""
        return JsonBytePairs.of(self._content)

    def _encode_by_library(self, texts: Sequence[str]) -> FlatIds:
        # `encode_batch_fast`, which does without the tokens' places in the text, is not always the faster of the two.
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return FlatIds.of([np.array(encoding.ids, dtype=np.int32) for encoding in encodings])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def _special(self) -> list[str]:
        return sorted(token.content for token in self._backend.get_added_tokens_decoder().values())


def _use_instead_of(path: Path) -> str:
    """What to name where a file is another JSON, perhaps one of those that Megatron-LM's tokenizers read."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        content = None
    if isinstance(content, list) and content and isinstance(content[0], dict) and "token_bytes" in content[0]:
        return (
            "it is a JSON of ranks as Megatron-LM's TikTokenizer reads it, whose ids follow special tokens: name the "
            "file of ranks (.tiktoken) or the tokenizer.json of the same model"
        )
    if isinstance(content, dict) and content and all(isinstance(number, int) for number in content.values()):
        return (
            "it is a vocabulary without merges: tools/preprocess_data.py --vocab-file and --merge-file make a "
            "tokenizer.json of the two"
        )
    return "name a whole file of that format (a Hugging Face fast tokenizer has one)"


def _eod_token(path: Path, vocabulary: dict[str, int], asked: str | None, special: list[str]) -> str:
    """The name of the token that ends documents. Raises TokenizerError when there is none."""
    candidates = [asked] if asked is not None else [END_OF_DOCUMENT, *_end_tokens_beside(path)]
    for token in candidates:
        if token in vocabulary:
            return token
    raise TokenizerError(
        f"{path} has no token {' or '.join(candidates)} to end documents with (it has {special[:10]})",
        f"set data.eod_token to one that it has, or add {candidates[0]} to its added_tokens",
        EOD,
    )


def _end_tokens_beside(path: Path) -> list[str]:
    """The end token that the files beside a `tokenizer.json` name, if any."""
    found = []
    for companion in (path.with_name(name) for name in _COMPANIONS):
        if companion.is_file():
            try:
                token: Any = json.loads(companion.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError) as error:
                raise TokenizerError(f"{companion} is no JSON object: {error}", "mend or remove it") from error
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                found.append(content)
    return found


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE (GPT-2's splitting into words) on `texts` and write it to `path`.

    The same texts give the same file. A corpus too small for `vocab_size` merges gives fewer tokens. Memory: the
    different words of the texts. Raises ValueError when `vocab_size` has no room for 256 bytes and `<|endoftext|>`.
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
