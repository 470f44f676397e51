"""Owns SentencePiece `.model` files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]  # made at import

from megatron_fp8.data.cuts import AT_SPACES, BEFORE_WORDS, Cuts
from megatron_fp8.data.vocab.backend import END_OF_DOCUMENT, EOD, FlatIds, TokenizerError

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_ACROSS = re.compile(rf"[^{_SPACE}]{_SPACE}")


class SentencePiece:
    """A `Backend` of a SentencePiece model. What its normalizer drops from a text, decoding does not bring back."""

    def __init__(self, path: Path, eod_token: str | None) -> None:
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.Load(str(path))
        except (RuntimeError, OSError) as error:
            raise TokenizerError(
                f"{path} is not a SentencePiece model: {error}", "name a whole .model file of SentencePiece"
            ) from error
        self.cuts = _cuts_of(self._model)
        self.eod_token = eod_token or self._own_eod(path)
        self.eod_id = self._model.PieceToId(self.eod_token)
        self.vocab_size: int = self._model.GetPieceSize()
        if self._model.IdToPiece(self.eod_id) != self.eod_token:
            raise TokenizerError(f"{path} has no piece {self.eod_token}", self._advice(), EOD)
        # A control piece is one that no text gives.
        if not self._model.IsControl(self.eod_id):
            raise TokenizerError(
                f"{path} reads {self.eod_token} inside a text as that piece: a text could end itself",
                self._advice(),
                EOD,
            )

    def encode(self, texts: Sequence[str]) -> FlatIds:
        """Ids of all texts, without beginning and end of each."""
        encoded = self._model.Encode(list(texts), num_threads=1)
        return FlatIds.of([np.array(ids, dtype=np.int32) for ids in encoded])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; the end of a document, for which the library would show nothing, by its name."""
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
            reason = f"{path} has neither a control piece {END_OF_DOCUMENT} nor an end of its own to end documents with"
            raise TokenizerError(reason, self._advice(), EOD)
        piece: str = self._model.IdToPiece(end)
        return piece

    def _advice(self) -> str:
        numbers = range(self._model.GetPieceSize())
        control = [self._model.IdToPiece(number) for number in numbers if self._model.IsControl(number)]
        return f"set data.eod_token to one of its control pieces: {', '.join(control[:10]) or 'it has none'}"


def _cuts_of(model: sentencepiece.SentencePieceProcessor) -> Cuts | None:
    """Where to cut: at spaces of a BPE none of whose pieces has a space after something else; None: nowhere.

    A unigram model adds up scores along the whole text, so that how they are rounded depends on what came before.
    """
    message = ModelProto.FromString(model.serialized_model_proto())
    normalizer, trainer = message.normalizer_spec, message.trainer_spec
    pieces = [piece.piece for piece in message.pieces]
    is_local = (
        trainer.model_type == trainer.BPE
        and not normalizer.precompiled_charsmap
        and normalizer.escape_whitespaces
        and not trainer.treat_whitespace_as_suffix
        and _SPACE in pieces
        and not any(_ACROSS.search(piece) for piece in pieces)
    )
    if is_local and normalizer.add_dummy_prefix:
        return AT_SPACES
    # Spaces at the beginning of a part would be removed, too.
    return BEFORE_WORDS if is_local and not normalizer.remove_extra_whitespaces else None
