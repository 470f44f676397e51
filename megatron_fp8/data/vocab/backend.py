"""What every kind of tokenizer provides, the error of an unusable one, and the byte-level kind, which needs no file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.errors import BadInputError

END_OF_DOCUMENT = "<|endoftext|>"
MODEL = "tokenizer_model"
TYPE = "tokenizer_type"
EOD = "eod_token"
PATTERN = "tiktoken_pattern"
NUM_BYTES = 256


class TokenizerError(BadInputError):
    """A tokenizer cannot be used; `reason` says why, `use_instead` what to do, `key` which data key is at fault."""

    def __init__(self, reason: str, use_instead: str, key: str = MODEL) -> None:
        super().__init__(f"{reason}; {use_instead}")
        self.reason = reason
        self.use_instead = use_instead
        self.key = key

    def as_option(self, value: object) -> str:
        """The message of a program whose options are named like the data keys; `value`: the option's, or None."""
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
