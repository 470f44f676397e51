"""Owns the byte-level BPE of a `tokenizer.json` as tiktoken's core computes it, several times as fast as `tokenizers`.

Only where the ids are provably the same; everything else is the library's. Both merge the pair of the lowest rank, the
leftmost of equals, until none is left; but tiktoken takes any two tokens that together are a token for a pair, the
library only those in its list of merges. So it is required that
- each token is the result of one merge, whose place in the list is its rank;
- each token's own bytes are merged to it by the library's rule.
Suppose then that both first differ where tiktoken merges x and y to t, which is no merge of the list. Up to there all
merges inside these bytes were what the library does to the bytes of t alone, since none went over their ends; so alone
they come to x, y too, and stay so, against the second condition.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import models

from megatron_fp8.data.vocab.backend import FlatIds
from megatron_fp8.data.vocab.joined_texts import JoinedTexts, has_long_spaces
from megatron_fp8.data.vocab.patterns import GPT2_OF_TOKENIZERS, PATTERNS_OF_JSON, classes_of
from megatron_fp8.data.vocab.unicode_classes import AgreedCharacters

_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
LETTER_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
"""GPT-2's letter for each byte: printable ones stand for themselves, the others for letters from 256 on."""
_BYTE_OF_LETTER = {letter: byte for byte, letter in LETTER_OF_BYTE.items()}


@dataclass(frozen=True)
class _Pairs:
    """Bytes of each token to its rank, and the id of each rank."""

    ranks: Mapping[bytes, int]
    ids: NDArray[np.int32]


class JsonBytePairs:
    """Encodes the texts of which it is sure, and leaves the others to the library."""

    def __init__(self, pattern: str, is_nfc: bool, pairs: _Pairs, added: Sequence[str]) -> None:
        """`added`: tokens that are found inside texts before these are split."""
        self._pattern = pattern
        self._is_nfc = is_nfc
        self._texts = JoinedTexts(pattern, pairs.ranks)
        self._ids = pairs.ids
        self._added = re.compile("|".join(map(re.escape, added))) if added else None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> JsonBytePairs | None:
        """Of a `tokenizer.json`; None where the ids might differ from the library's."""
        pattern = pattern_of(content)
        normalizer = content.get("normalizer")
        is_nfc = normalizer == {"type": "NFC"}
        pairs = _pairs_of(content) if pattern in PATTERNS_OF_JSON and (normalizer is None or is_nfc) else None
        if pattern is None or pairs is None:
            return None
        return cls(pattern, is_nfc, pairs, inner_tokens(content))

    def encode(self, texts: Sequence[str], library: Callable[[Sequence[str]], FlatIds]) -> FlatIds:
        """Ids of all texts; `library` encodes those that are left to it."""
        is_sure = [self._is_sure(text) for text in texts]
        if all(is_sure):
            return self._of_ranks(self._texts.encode(texts))
        sure = self._of_ranks(self._texts.encode([text for text, is_ in zip(texts, is_sure, strict=True) if is_]))
        rest = library([text for text, is_ in zip(texts, is_sure, strict=True) if not is_])
        found = iter(sure.split()), iter(rest.split())
        return FlatIds.of([next(found[0] if is_ else found[1]) for is_ in is_sure])

    def _of_ranks(self, flat: FlatIds) -> FlatIds:
        return FlatIds(self._ids[flat.ids], flat.lengths)

    def _is_sure(self, text: str) -> bool:
        if self._added is not None and self._added.search(text) is not None:
            return False
        if has_long_spaces(text):
            return False
        if text.isascii():
            return True
        if self._is_nfc and not unicodedata.is_normalized("NFC", text):
            return False
        return self._agreed.are_all_of(text)

    @cached_property
    def _agreed(self) -> AgreedCharacters:
        """Made when a text is not ASCII: it takes some tenths of a second."""
        return AgreedCharacters(classes_of(self._pattern), self._is_nfc)


def pattern_of(content: Mapping[str, Any]) -> str | None:
    """The regular expression by which a byte-level tokenizer splits a text into words; None for other tokenizers."""
    splitter = content.get("pre_tokenizer") or {}
    if splitter.get("type") == "ByteLevel":
        plain = splitter.get("use_regex", True) and not splitter.get("add_prefix_space", True)
        return GPT2_OF_TOKENIZERS if plain else None
    steps = splitter.get("pretokenizers", []) if splitter.get("type") == "Sequence" else []
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, letters = steps
    if letters.get("use_regex", True) or letters.get("add_prefix_space", True):
        return None
    if split.get("behavior") != "Isolated" or split.get("invert", False):
        return None
    pattern: str | None = split.get("pattern", {}).get("Regex")
    return pattern


def inner_tokens(content: Mapping[str, Any]) -> list[str]:
    """The added tokens that the library finds inside texts: those that are not special."""
    return [token["content"] for token in content.get("added_tokens", []) if not token.get("special", False)]


def _pairs_of(content: Mapping[str, Any]) -> _Pairs | None:
    """Of a BPE that meets the conditions above; None for others."""
    model = content["model"]
    is_plain = not any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    )
    if model.get("type") != "BPE" or not is_plain or not model["merges"]:
        return None
    vocabulary: dict[str, int] = model["vocab"]
    if not all(letter in vocabulary for letter in _BYTE_OF_LETTER):
        return None
    ranks = {bytes((byte,)): byte for byte in range(256)}
    ids = [vocabulary[LETTER_OF_BYTE[byte]] for byte in range(256)]
    merges: list[tuple[str, str]] = []
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        merges.append((left, right))
    tokens = [left + right for left, right in merges]
    for token in tokens:
        try:
            ranks[bytes(map(_BYTE_OF_LETTER.__getitem__, token))] = len(ids)
        except KeyError:
            return None
        ids.append(vocabulary[token])
    if len(ranks) != len(ids):
        # Two merges have one result.
        return None
    if model.get("ignore_merges") and not vocabulary.keys() <= {*tokens, *_BYTE_OF_LETTER}:
        # The library would take a word that is one of the others for that, tiktoken would not.
        return None
    library = models.BPE(vocabulary, merges)
    if any(len(library.tokenize(token)) != 1 for token in tokens):
        return None
    return _Pairs(ranks, np.array(ids, dtype=np.int32))
