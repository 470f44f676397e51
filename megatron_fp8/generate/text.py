"""Owns the way between text and the tokens of a sample. Imports no torch; must not know models."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fp8.data.tokenizer import Tokenizer

# What an unfinished character decodes to.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A prompt's tokens; of an empty one the end of a document, which is what a document comes after."""
    return tokenizer.encode(prompt) or [tokenizer.eod_id]


class TextStream:
    """The text of a sample's new tokens, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._before = tokenizer.decode(self._tokens)
        self._shown = 0
        self.text = ""

    def add(self, token: int) -> str:
        """The text that is certain now and was not before; empty in the middle of a character."""
        self._tokens.append(token)
        # Decoded together with the prompt: some tokenizers drop a space at the beginning of a text.
        self.text = self._tokenizer.decode(self._tokens).removeprefix(self._before)
        return "" if self.text.endswith(_UNFINISHED) else self.rest()

    def rest(self) -> str:
        """What has not been given yet, unfinished characters too."""
        piece = self.text[self._shown :]
        self._shown = len(self.text)
        return piece
