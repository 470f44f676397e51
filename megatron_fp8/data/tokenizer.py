"""Loads a tokenizer of any kind (`tokenizer_kinds`), from text to token ids and back. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.config.paths import why_refused, why_unreadable
from megatron_fp8.data.tokenizer_kinds import (
    END_OF_DOCUMENT,
    TYPE,
    Backend,
    ByteLevel,
    HuggingFace,
    SentencePiece,
    TokenizerError,
)

if TYPE_CHECKING:
    from megatron_fp8.config.schema import DataConfig

__all__ = ["END_OF_DOCUMENT", "TOKENIZER_TYPES", "Tokenizer", "TokenizerError"]

AUTO = "auto"
HUGGING_FACE = "HuggingFaceTokenizer"
SENTENCE_PIECE = "SentencePieceTokenizer"
TIKTOKEN = "TikTokenizer"
BYTE_LEVEL = "ByteLevelTokenizer"
TOKENIZER_TYPES = (AUTO, HUGGING_FACE, SENTENCE_PIECE, TIKTOKEN, BYTE_LEVEL)
# What is loaded from a folder: the first of these that exists.
_FILES_OF_FOLDER = ("tokenizer.json", "tokenizer.model", "*.tiktoken")
_START_BYTES = 4096
_READABLE = "name a readable file"


class Tokenizer:
    """A loaded tokenizer of any kind.

    Inside a text `<|endoftext|>`, or whatever token ends documents, is encoded as its letters: only code that
    concatenates documents writes `eod_id`, so a document cannot end itself.
    """

    def __init__(self, backend: Backend, tokenizer_type: str, path: str | None) -> None:
        self._backend = backend
        self.tokenizer_type = tokenizer_type
        self.path = path
        self.eod_id = backend.eod_id
        self.bos_id = backend.bos_id
        self.adds_bos = backend.adds_bos
        # Largest id + 1, not the number of tokens: the largest id needs an embedding row.
        self.vocab_size = backend.vocab_size

    @classmethod
    def load(
        cls,
        path: str | Path | None,
        tokenizer_type: str = AUTO,
        eod_token: str | None = None,
        tiktoken_pattern: str | None = None,
    ) -> Tokenizer:
        """The tokenizer in the file, or folder with one, at `path`; arguments as the data keys of their names.

        Raises TokenizerError for a missing, foreign or corrupt file, and one without an end-of-document token.
        """
        if tokenizer_type not in TOKENIZER_TYPES:
            raise TokenizerError(
                f"unknown tokenizer type {tokenizer_type}", f"use one of {', '.join(TOKENIZER_TYPES)}", TYPE
            )
        if tokenizer_type == BYTE_LEVEL:
            if path is not None:
                raise TokenizerError(f"{BYTE_LEVEL} takes no file", "leave the tokenizer model out")
            return cls(ByteLevel(eod_token or END_OF_DOCUMENT), BYTE_LEVEL, None)
        if path is None:
            raise TokenizerError(
                "no tokenizer file is given", f"name one, or use data.tokenizer_type {BYTE_LEVEL}, which needs none"
            )
        try:
            return cls._of_file(tokenizer_file(path), tokenizer_type, eod_token, tiktoken_pattern)
        except OSError as error:
            refused = path if error.filename is None else os.fsdecode(error.filename)
            raise TokenizerError(why_refused(refused, error), _READABLE) from error

    @classmethod
    def _of_file(
        cls, file: Path, tokenizer_type: str, eod_token: str | None, tiktoken_pattern: str | None
    ) -> Tokenizer:
        if reason := why_unreadable(file):
            raise TokenizerError(reason, _READABLE)
        kind = _kind_of(file) if tokenizer_type == AUTO else tokenizer_type
        backend: Backend
        if kind == HUGGING_FACE:
            backend = HuggingFace(file, eod_token)
        elif kind == SENTENCE_PIECE:
            backend = SentencePiece(file, eod_token)
        else:
            # On demand, like SentencePiece's library.
            from megatron_fp8.data.tiktoken_ranks import TiktokenRanks

            backend = TiktokenRanks(file, eod_token, tiktoken_pattern)
        return cls(backend, kind, str(file))

    @classmethod
    def of(cls, data: DataConfig) -> Tokenizer:
        """The tokenizer of a config. Raises TokenizerError."""
        return cls.load(data.tokenizer_model, data.tokenizer_type, data.eod_token, data.tiktoken_pattern)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without an end-of-document token."""
        ids: list[int] = self._backend.encode([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Token ids of each text, [num_tokens], of any integer dtype."""
        return self._backend.encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; `eod_id` shows as its name."""
        return self._backend.decode(ids)


def tokenizer_file(path: str | Path) -> Path:
    """The file at `path`, or the tokenizer file in the folder at `path`. Raises TokenizerError."""
    place = Path(path)
    if place.is_dir():
        for pattern in _FILES_OF_FOLDER:
            for file in sorted(place.glob(pattern)):
                return file
        raise TokenizerError(
            f"{path} is a directory without {', '.join(_FILES_OF_FOLDER)}",
            "name a tokenizer file (transformers' AutoTokenizer.save_pretrained writes a tokenizer.json)",
        )
    if not place.is_file():
        raise TokenizerError(f"{path} does not exist", "name an existing tokenizer.json, .model or .tiktoken file")
    return place


def _kind_of(file: Path) -> str:
    """The kind, by the first bytes: a `.model` file may also hold ranks."""
    with file.open("rb") as stream:
        start = stream.read(_START_BYTES)
    # A SentencePiece model is a protobuf message whose first field is a piece.
    if start[:1] == b"\n" and file.suffix != ".json":
        return SENTENCE_PIECE
    # A token in base64 and its rank.
    return TIKTOKEN if re.match(rb"[A-Za-z0-9+/]+={0,2}[ \t]+\d+\s*(\n|$)", start) else HUGGING_FACE
