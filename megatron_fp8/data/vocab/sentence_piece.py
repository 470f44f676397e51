"""SentencePiece `.model` files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from megatron_fp8.data.vocab.backend import END_OF_DOCUMENT, EOD, TokenizerError


class SentencePiece:
    """A `Backend` of a SentencePiece model. Decoding does not restore what its normalizer drops."""

    def __init__(self, path: Path, eod_token: str | None) -> None:
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.Load(str(path))
        except (RuntimeError, OSError) as error:
            raise TokenizerError(
                f"{path} is not a SentencePiece model: {error}", "name a complete SentencePiece .model file"
            ) from error
        self.eod_token = eod_token or self._own_eod(path)
        self.eod_id = self._model.PieceToId(self.eod_token)
        self.vocab_size: int = self._model.GetPieceSize()
        if self._model.IdToPiece(self.eod_id) != self.eod_token:
            raise TokenizerError(f"{path} has no piece {self.eod_token}", self._advice(), EOD)
        # No text encodes to a control piece.
        if not self._model.IsControl(self.eod_id):
            raise TokenizerError(
                f"{path} encodes {self.eod_token} inside a text as that piece: a text could end itself",
                self._advice(),
                EOD,
            )

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of each text, without BOS and EOS."""
        return [np.array(ids, dtype=np.int32) for ids in self._model.Encode(list(texts), num_threads=1)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; `eod_id`, which the library would omit, shows as its name."""
        parts: list[list[int]] = [[]]
        for token in ids:
            if token == self.eod_id:
                parts.append([])
            else:
                parts[-1].append(int(token))
        return self.eod_token.join(self._model.Decode(part) for part in parts)

    def _own_eod(self, path: Path) -> str:
        own: int = self._model.PieceToId(END_OF_DOCUMENT)
        if self._model.IsControl(own):
            return END_OF_DOCUMENT
        end: int = self._model.eos_id()
        if end < 0:
            raise TokenizerError(f"{path} has neither a control piece {END_OF_DOCUMENT} nor EOS", self._advice(), EOD)
        piece: str = self._model.IdToPiece(end)
        return piece

    def _advice(self) -> str:
        numbers = range(self._model.GetPieceSize())
        control = [self._model.IdToPiece(number) for number in numbers if self._model.IsControl(number)]
        return f"set data.eod_token to one of its control pieces ({', '.join(control[:10]) or 'it has none'})"
