"""Owns files of ranks as tiktoken has them: a line is a token's bytes in base64 and its rank, which is its id.

Such a file does not say how text is split into words before tokens are merged, so the pattern must be named: one of
`patterns.PATTERNS`, or a regular expression.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from megatron_fp8.data.cuts import WORDS_AND_LINES
from megatron_fp8.data.vocab.backend import END_OF_DOCUMENT, PATTERN, FlatIds, TokenizerError
from megatron_fp8.data.vocab.joined_texts import JoinedTexts
from megatron_fp8.data.vocab.patterns import PATTERNS

# Where the published encodings have their end of a document; elsewhere it is the first id after the ranks.
_PUBLISHED_EODS = {"gpt2": 50256, "r50k_base": 50256, "p50k_base": 50256, "cl100k_base": 100257, "o200k_base": 199999}


class TiktokenRanks:
    """A `Backend` of a file of ranks. `pattern` None: by the file's name, where that is a published one's."""

    def __init__(self, path: Path, eod_token: str | None, pattern: str | None) -> None:
        name = pattern or path.name.partition(".")[0]
        if pattern is None and name not in PATTERNS:
            raise TokenizerError(
                f"{path} holds ranks, and not how text is split before merging",
                f"name the pattern with data.tiktoken_pattern: {', '.join(PATTERNS)}, or a regular expression",
                PATTERN,
            )
        ranks = read_ranks(path)
        self.eod_token = eod_token or END_OF_DOCUMENT
        after = max(ranks.values()) + 1
        published = _PUBLISHED_EODS.get(name, after)
        # A file of ranks of one's own may be split as a published one is, and be larger or much smaller.
        self.eod_id = published if path.name.partition(".")[0] == name and published >= after else after
        self.vocab_size = self.eod_id + 1
        # What another expression does at a place, no one knows.
        self.cuts = WORDS_AND_LINES if name in PATTERNS else None
        self._bytes = {rank: token for token, rank in ranks.items()} | {self.eod_id: self.eod_token.encode()}
        try:
            self._texts = JoinedTexts(PATTERNS.get(name, name), ranks)
        except Exception as error:  # the library raises what its regular expressions do, and bare assertions
            reason = f"{name} is neither one of {', '.join(PATTERNS)} nor a regular expression of tiktoken: {error!r}"
            raise TokenizerError(reason, "name one of these", PATTERN) from error

    def encode(self, texts: Sequence[str]) -> FlatIds:
        """Ids of all texts."""
        return self._texts.encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8 show as replacement characters, ids that are no token by number.

        Between the ranks and the end of a document there may be such ids, and a model may write them.
        """
        parts = (self._bytes.get(int(token)) or f"<|{token}|>".encode() for token in ids)
        return b"".join(parts).decode(errors="replace")


def read_ranks(path: Path) -> dict[bytes, int]:
    """Rank of each token. Raises TokenizerError, with the line, for a file that is broken or lacks a byte."""
    ranks: dict[bytes, int] = {}
    use = "name a whole file of ranks: a line is base64, a space, a number"
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:  # binascii's error is one too
            raise TokenizerError(f"{path}, line {number}: is no token and rank: {error}", use) from error
    missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if missing:
        raise TokenizerError(f"{path} has no rank for the byte {missing[0]}: not every text can be encoded", use)
    if len(set(ranks.values())) < len(ranks):
        raise TokenizerError(f"{path} gives two tokens the same rank", use)
    return ranks
