"""Owns text to token ids and back, for every kind of tokenizer (`vocab/`), and which kind a file is.

Imports no torch, knows nothing of files of tokens.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.config.paths import why_refused, why_unreadable
from megatron_fp8.data.vocab.backend import END_OF_DOCUMENT, TYPE, Backend, FlatIds, TokenizerError
from megatron_fp8.data.vocab.byte_level import ByteLevel
from megatron_fp8.data.vocab.hugging_face import HuggingFace, train_byte_level_bpe

if TYPE_CHECKING:
    from megatron_fp8.config.schema import DataConfig

__all__ = ["END_OF_DOCUMENT", "TOKENIZER_TYPES", "Tokenizer", "TokenizerError", "train_bpe"]

AUTO = "auto"
HUGGING_FACE = "HuggingFaceTokenizer"
SENTENCE_PIECE = "SentencePieceTokenizer"
TIKTOKEN = "TikTokenizer"
BYTE_LEVEL = "ByteLevelTokenizer"
TOKENIZER_TYPES = (AUTO, HUGGING_FACE, SENTENCE_PIECE, TIKTOKEN, BYTE_LEVEL)
# In a folder, the first of these that is there.
_FILES_OF_FOLDER = ("tokenizer.json", "tokenizer.model", "*.tiktoken")
_START_BYTES = 4096
_READABLE = "name a file that can be read"


class Tokenizer:
    """A loaded tokenizer of any kind.

    `<|endoftext|>`, or whatever ends documents, is inside a text what its letters are: only code that joins
    documents writes `eod_id`, so a document cannot end itself.
    """

    def __init__(self, backend: Backend, tokenizer_type: str, path: str | None) -> None:
        self._backend = backend
        self.tokenizer_type = tokenizer_type
        self.path = path
        self.eod_id = backend.eod_id
        # Not the number of tokens: a vocabulary may have holes, and its largest id needs an embedding row.
        self.vocab_size = backend.vocab_size
        self.cuts = backend.cuts

    @classmethod
    def load(
        cls,
        path: str | Path | None,
        tokenizer_type: str = AUTO,
        eod_token: str | None = None,
        tiktoken_pattern: str | None = None,
    ) -> Tokenizer:
        """The tokenizer in the file, or folder with one, at `path`; the arguments are the data keys of their names.

        Raises TokenizerError for a missing, foreign or broken file, and where nothing ends documents.
        """
        if tokenizer_type not in TOKENIZER_TYPES:
            raise TokenizerError(
                f"there is no tokenizer type {tokenizer_type}", f"use {', '.join(TOKENIZER_TYPES)}", TYPE
            )
        if tokenizer_type == BYTE_LEVEL:
            if path is not None:
                raise TokenizerError(f"{BYTE_LEVEL} needs no file", "leave the tokenizer model out")
            return cls(ByteLevel(eod_token or END_OF_DOCUMENT), BYTE_LEVEL, None)
        if path is None:
            raise TokenizerError(
                "there is no file", f"name one, or use data.tokenizer_type {BYTE_LEVEL}, which needs none"
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
            # Imported where they are wanted: every encoding process would load the libraries of all kinds.
            from megatron_fp8.data.vocab.sentence_piece import SentencePiece

            backend = SentencePiece(file, eod_token)
        else:
            from megatron_fp8.data.vocab.tiktoken_ranks import TiktokenRanks

            backend = TiktokenRanks(file, eod_token, tiktoken_pattern)
        return cls(backend, kind, str(file))

    @classmethod
    def of(cls, data: DataConfig) -> Tokenizer:
        """The tokenizer of a config. Raises TokenizerError."""
        return cls.load(data.tokenizer_model, data.tokenizer_type, data.eod_token, data.tiktoken_pattern)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without an end-of-document token."""
        ids: list[int] = self._backend.encode([text]).ids.tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Token ids of each text, [num_tokens], of any integer dtype."""
        return self.encode_flat(texts).split()

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        """Token ids of all texts, one text after another."""
        return self._backend.encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; `eod_id` shows as its name."""
        return self._backend.decode(ids)


def tokenizer_file(path: str | Path) -> Path:
    """The file that `path` names, or that is in the folder it names. Raises TokenizerError."""
    place = Path(path)
    if place.is_dir():
        for pattern in _FILES_OF_FOLDER:
            for file in sorted(place.glob(pattern)):
                return file
        raise TokenizerError(
            f"{path} is a directory without {', '.join(_FILES_OF_FOLDER)}",
            "name a tokenizer's file (transformers' AutoTokenizer saves a tokenizer.json)",
        )
    if not place.is_file():
        raise TokenizerError(f"{path} does not exist", "name an existing tokenizer.json, .model or .tiktoken file")
    return place


def _kind_of(file: Path) -> str:
    """By what the file starts with: a `.model` may be of ranks too."""
    with file.open("rb") as stream:
        start = stream.read(_START_BYTES)
    # The first field of a SentencePiece model, a message in protobuf: a piece.
    if start[:1] == b"\n" and file.suffix != ".json":
        return SENTENCE_PIECE
    return TIKTOKEN if _looks_like_ranks(start) else HUGGING_FACE


def _looks_like_ranks(start: bytes) -> bool:
    """Whether the first line is a token in base64 and a number."""
    parts = start.partition(b"\n")[0].split()
    try:
        return len(parts) == 2 and parts[1].isdigit() and bool(base64.b64decode(parts[0], validate=True))
    except binascii.Error:
        return False


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> Tokenizer:
    """Train a byte-level BPE on `texts`, write it to `path`, return it (`vocab.hugging_face.train_byte_level_bpe`)."""
    train_byte_level_bpe(texts, vocab_size, Path(path))
    return Tokenizer.load(path)
