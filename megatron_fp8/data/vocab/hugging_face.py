"""Hugging Face `tokenizer.json` files: any tokenizer of the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron_fp8.data.vocab.backend import END_OF_DOCUMENT, EOD, TokenizerError

# Files beside a tokenizer.json that name its end-of-sequence token.
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")


class HuggingFace:
    """A `Backend` of a `tokenizer.json`."""

    def __init__(self, path: Path, eod_token: str | None) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for every kind of error
            raise TokenizerError(
                f"{path} is not a tokenizer.json of the tokenizers library: {error}", _use_instead_of(path)
            ) from error
        # Special tokens inside a text are text like any other.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        special = sorted(token.content for token in self._tokenizer.get_added_tokens_decoder().values())
        self.eod_token = _eod_token(path, vocabulary, eod_token, special)
        self.eod_id = vocabulary[self.eod_token]
        self.vocab_size = max(vocabulary.values()) + 1
        if self.eod_id in self.encode([self.eod_token])[0]:
            raise TokenizerError(
                f"{path} encodes {self.eod_token} inside a text as the end of a document: a text could end itself",
                'set "special": true for the token in its added_tokens, or name another data.eod_token',
                EOD,
            )

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of each text, without the special tokens that the tokenizer would add before or after it."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def _use_instead_of(path: Path) -> str:
    """Advice for a file that is other JSON, perhaps of one of Megatron-LM's tokenizers."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        content = None
    if isinstance(content, list) and content and isinstance(content[0], dict) and "token_bytes" in content[0]:
        return (
            "it holds ranks in the JSON format of Megatron-LM's TikTokenizer, whose ids follow the special tokens: "
            "name the rank file (.tiktoken) or the tokenizer.json of the same model"
        )
    if isinstance(content, dict) and content and all(isinstance(number, int) for number in content.values()):
        return (
            "it is a vocabulary without merges: tools/preprocess_data.py --vocab-file and --merge-file convert the two "
            "to a tokenizer.json"
        )
    return "name a complete file of that format (every fast Hugging Face tokenizer has one)"


def _eod_token(path: Path, vocabulary: dict[str, int], asked: str | None, special: list[str]) -> str:
    """The name of the token that ends documents. Raises TokenizerError if there is none."""
    candidates = [asked] if asked is not None else [END_OF_DOCUMENT, *_end_tokens_beside(path)]
    for token in candidates:
        if token in vocabulary:
            return token
    raise TokenizerError(
        f"{path} has no end-of-document token {' or '.join(candidates)} (its special tokens: {special[:10]})",
        f"set data.eod_token to one of its tokens, or add {candidates[0]} to its added_tokens",
        EOD,
    )


def _end_tokens_beside(path: Path) -> list[str]:
    """The end-of-sequence tokens that files beside a `tokenizer.json` name."""
    found = []
    for companion in (path.with_name(name) for name in _COMPANIONS):
        if companion.is_file():
            try:
                token: Any = json.loads(companion.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError) as error:
                raise TokenizerError(f"{companion} is not a JSON object: {error}", "fix or remove it") from error
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                found.append(content)
    return found
