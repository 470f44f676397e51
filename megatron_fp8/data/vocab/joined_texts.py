"""Owns encoding many texts by byte pairs in one call of tiktoken's core, given how texts are split and what merges.

Calls cost as much as a short text, so texts are joined with a special token between them, at which the core splits
before all else: the ids between two such tokens are those of the text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import regex
import tiktoken
from numpy.typing import NDArray

from megatron_fp8.data.vocab.backend import FlatIds

# Code points that are no characters and stay so; a text that has them all the same is encoded by itself.
_BETWEEN = "\ufdd0between\ufdd1"
_GROUP_CHARS = 2**18
_SPACES_CHARS = 2**17


class JoinedTexts:
    """Texts to ranks, [num_tokens] in uint32. Raises what tiktoken raises for a pattern that is no expression."""

    def __init__(self, pattern: str, ranks: Mapping[bytes, int]) -> None:
        self._pattern = pattern
        self._ranks = dict(ranks)
        self._between = max(ranks.values()) + 1
        self._encoding = tiktoken.Encoding(
            "joined", pat_str=pattern, mergeable_ranks=self._ranks, special_tokens={_BETWEEN: self._between}
        )

    def encode(self, texts: Sequence[str]) -> FlatIds:
        """Ranks of all texts."""
        parts = [self._encode_group(group) for group in _groups(texts)]
        return FlatIds.concatenate(parts) if parts else FlatIds.of([])

    def _encode_group(self, texts: Sequence[str]) -> FlatIds:
        if len(texts) == 1 and has_long_spaces(texts[0]):
            return FlatIds.of([self._encode_long_spaces(texts[0])])
        ranks = self._encoding.encode_to_numpy(_BETWEEN.join(texts), allowed_special={_BETWEEN}, disallowed_special=())
        is_between = ranks == self._between
        places = np.flatnonzero(is_between)
        if len(places) != len(texts) - 1:
            return FlatIds.of([self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts])
        lengths = np.diff(places, prepend=-1, append=len(ranks)) - 1
        return FlatIds(ranks[~is_between], lengths)

    def _encode_long_spaces(self, text: str) -> NDArray[np.uint32]:
        """A text with a million spaces in a row, over which the expressions of tiktoken's core run out of stack."""
        whole = tiktoken.Encoding("whole", pat_str="(?s:.+)", mergeable_ranks=self._ranks, special_tokens={})
        words = (match.group() for match in regex.finditer(self._pattern, text))
        return np.concatenate([whole.encode_to_numpy(word, disallowed_special=()) for word in words])


def has_long_spaces(text: str) -> bool:
    """Whether white space of 2^18 characters stands in a row; of fewer than 2^17 it does not."""
    # Such a row holds one whole part of those that begin at multiples of half its length.
    return any(
        text[start].isspace() and text[start : start + _SPACES_CHARS].isspace()
        for start in range(0, len(text) - _SPACES_CHARS + 1, _SPACES_CHARS)
    )


def _groups(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Texts that are joined: not so many that the ids leave the caches; one alone that is long enough."""
    begin = size = 0
    for number, text in enumerate(texts):
        if size and size + len(text) > _GROUP_CHARS:
            yield texts[begin:number]
            begin, size = number, 0
        size += len(text)
    if begin < len(texts):
        yield texts[begin:]
