"""Tiktoken rank files: a line is a token's bytes in base64 and its rank, which is its id.

Such a file does not say how text is split into words before merging, so the pattern must be named: one of `PATTERNS`,
or a regular expression.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import regex
import tiktoken
from numpy.typing import NDArray

from megatron_fp8.data.tokenizer_kinds import END_OF_DOCUMENT, PATTERN, TokenizerError

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORTENED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
PATTERNS = {
    "gpt2": _GPT2,
    "r50k_base": _GPT2,
    "p50k_base": _GPT2,
    "cl100k_base": _CL100K,
    "o200k_base": _WORDS % (f"{_SHORTENED}?", f"{_SHORTENED}?") + r"|\p{N}{1,3}" + _TAIL,
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": _WORDS % ("", "") + r"|\p{N}" + _TAIL,
}
"""How text is split before merging, by name; from tiktoken's `openai_public`, `v1` and `v2` from Megatron Core."""
# End-of-document ids of the published encodings; elsewhere it is the first id after the ranks.
_PUBLISHED_EODS = {"gpt2": 50256, "r50k_base": 50256, "p50k_base": 50256, "cl100k_base": 100257, "o200k_base": 199999}


class TiktokenRanks:
    """A `Backend` of a rank file. `pattern` None: by the file's name, if that is a published one."""

    def __init__(self, path: Path, eod_token: str | None, pattern: str | None) -> None:
        name = pattern or path.name.partition(".")[0]
        if pattern is None and name not in PATTERNS:
            raise TokenizerError(
                f"{path} is a rank file, which does not say how text is split before merging",
                f"name the pattern with data.tiktoken_pattern: {', '.join(PATTERNS)}, or a regular expression",
                PATTERN,
            )
        self._ranks = read_ranks(path)
        self._pattern = PATTERNS.get(name, name)
        self.eod_token = eod_token or END_OF_DOCUMENT
        after = max(self._ranks.values()) + 1
        published = _PUBLISHED_EODS.get(name, after)
        # A custom rank file may be split like a published one and have other ids.
        self.eod_id = published if path.name.partition(".")[0] == name and published >= after else after
        self.vocab_size = self.eod_id + 1
        self.bos_id: int | None = None
        self.adds_bos = False
        self._bytes = {rank: token for token, rank in self._ranks.items()} | {self.eod_id: self.eod_token.encode()}
        try:
            self._encoding = self._encoding_of(self._pattern)
        except Exception as error:  # the library raises what its regular expressions do, and bare assertions
            reason = f"{name} is neither one of {', '.join(PATTERNS)} nor a regular expression of tiktoken: {error!r}"
            raise TokenizerError(reason, "name one of these", PATTERN) from error

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of each text."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> NDArray[np.integer]:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:
            # Tiktoken's regular expressions run out of stack on a million spaces in a row.
            whole = self._encoding_of("(?s:.+)")
            words = (match.group() for match in regex.finditer(self._pattern, text))
            return np.concatenate([whole.encode_to_numpy(word, disallowed_special=()) for word in words])

    def _encoding_of(self, pattern: str) -> tiktoken.Encoding:
        return tiktoken.Encoding("ranks", pat_str=pattern, mergeable_ranks=self._ranks, special_tokens={})

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; invalid UTF-8 shows as replacement characters, ids without a token as their number.

        There may be such ids between the ranks and the end-of-document token, and a model may generate them.
        """
        parts = (self._bytes.get(int(token)) or f"<|{token}|>".encode() for token in ids)
        return b"".join(parts).decode(errors="replace")


def read_ranks(path: Path) -> dict[bytes, int]:
    """Rank of each token. Raises TokenizerError, with the line, for a malformed file and one without some byte."""
    ranks: dict[bytes, int] = {}
    use = "name a complete rank file, each line a token in base64, a space and a number"
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:  # binascii's error is one too
            raise TokenizerError(f"{path}, line {number}: not a token and a rank: {error}", use) from error
    missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if missing:
        raise TokenizerError(f"{path} has no rank for byte {missing[0]}, so it cannot encode every text", use)
    if len(set(ranks.values())) < len(ranks):
        raise TokenizerError(f"{path} gives two tokens the same rank", use)
    return ranks
