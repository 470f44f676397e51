"""The kinds of tokenizers: byte-level, Hugging Face's `tokenizer.json`, SentencePiece (tiktoken: `tiktoken_ranks`)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron_fp8.errors import BadInputError

END_OF_DOCUMENT = "<|endoftext|>"
MODEL = "tokenizer_model"
TYPE = "tokenizer_type"
EOD = "eod_token"
PATTERN = "tiktoken_pattern"
NUM_BYTES = 256
# Files beside a tokenizer.json that name its end-of-sequence token.
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")


class TokenizerError(BadInputError):
    """A tokenizer cannot be used: the reason, what to use instead, and which data key is at fault."""

    def __init__(self, reason: str, use_instead: str, key: str = MODEL) -> None:
        super().__init__(f"{reason}; {use_instead}")
        self.reason = reason
        self.use_instead = use_instead
        self.key = key

    def as_option(self, value: object) -> str:
        """The message of a command whose options are named like the data keys; `value`: the option's."""
        option = f"--{self.key.replace('_', '-')}"
        use_instead = re.sub(r"data\.(\w+)", lambda key: f"--{key[1].replace('_', '-')}", self.use_instead)
        return f"{option if value is None else f'{option} {value}'}: {self.reason}; {use_instead}"

    def __reduce__(self) -> tuple[type[TokenizerError], tuple[str, str, str]]:
        """Pickled by its parts, to survive being raised in a worker process."""
        return type(self), (self.reason, self.use_instead, self.key)


class Backend(Protocol):
    """One kind of tokenizer. No text encodes to `eod_id`: a document cannot end itself."""

    eod_id: int
    """The id that ends a document."""
    bos_id: int | None
    """The id that begins a text where the tokenizer has one."""
    adds_bos: bool
    """Whether the tokenizer, called as its own library calls it, puts that id before a text."""
    vocab_size: int
    """Largest id + 1, which is more than the number of tokens where the vocabulary has holes."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of each text, of any integer dtype."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens show as their names."""


class ByteLevel:
    """A `Backend` without a file: the ids 0 to 255 are UTF-8 bytes, 256 ends a document and shows as `eod_token`.

    Megatron's `ByteLevelTokenizer` has the same ids for text, but ends documents with 0, which is also a character.
    """

    eod_id = NUM_BYTES
    bos_id: int | None = None
    adds_bos = False
    vocab_size = NUM_BYTES + 1

    def __init__(self, eod_token: str) -> None:
        self._eod_token = eod_token

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Invalid UTF-8 shows as replacement characters. Raises ValueError for an id above 256."""
        eod = self._eod_token.encode()
        parts = (eod if token == self.eod_id else bytes((token,)) for token in ids)
        return b"".join(parts).decode(errors="replace")


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
        self.bos_id, self.adds_bos = self._bos(path, vocabulary)
        if self.eod_id in self.encode([self.eod_token])[0]:
            raise TokenizerError(
                f"{path} encodes {self.eod_token} inside a text as the end of a document: a text could end itself",
                'set "special": true for the token in its added_tokens, or name another data.eod_token',
                EOD,
            )

    def _bos(self, path: Path, vocabulary: dict[str, int]) -> tuple[int | None, bool]:
        """The token before a text by the post-processor, or by the files beside; whether it is put there."""
        with_special = self._tokenizer.encode("a", add_special_tokens=True)
        if with_special.special_tokens_mask[:1] == [1]:
            return with_special.ids[0], True
        for token, adds in _named_beside(path, "bos_token", "add_bos_token"):
            if token in vocabulary:
                return vocabulary[token], adds
        return None, False

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
    return [token for token, _ in _named_beside(path, "eos_token", "add_eos_token")]


def _named_beside(path: Path, role: str, adds: str) -> list[tuple[str, bool]]:
    """(token, whether it is added to texts) of a role in each file beside a `tokenizer.json` that names one."""
    found = []
    for companion in (path.with_name(name) for name in _COMPANIONS):
        if companion.is_file():
            try:
                settings: Any = json.loads(companion.read_text(encoding="utf-8"))
                token = settings.get(role)
            except (ValueError, AttributeError) as error:
                raise TokenizerError(f"{companion} is not a JSON object: {error}", "fix or remove it") from error
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                found.append((content, settings.get(adds) is True))
    return found


class SentencePiece:
    """A `Backend` of a SentencePiece model. Decoding does not restore what its normalizer drops."""

    def __init__(self, path: Path, eod_token: str | None) -> None:
        # Imported on demand: otherwise every encoding process would load the libraries of all kinds.
        import sentencepiece

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
        begin: int = self._model.bos_id()
        # The convention of Llama 1 and 2, Mistral and Gemma, whose tokenizers put it before every text.
        self.bos_id: int | None = begin if begin >= 0 else None
        self.adds_bos = self.bos_id is not None
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
