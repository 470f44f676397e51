"""Owns what every kind of tokenizer offers, and the error of one that cannot be used. Knows no kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.config.problem import BadInputError

END_OF_DOCUMENT = "<|endoftext|>"
MODEL = "tokenizer_model"
TYPE = "tokenizer_type"
EOD = "eod_token"
PATTERN = "tiktoken_pattern"


class TokenizerError(BadInputError):
    """A tokenizer cannot be used; `reason` says why, `use_instead` what to do, `key` which data key is to blame."""

    def __init__(self, reason: str, use_instead: str, key: str = MODEL) -> None:
        super().__init__(f"{reason}; {use_instead}")
        self.reason = reason
        self.use_instead = use_instead
        self.key = key

    def as_option(self, value: object) -> str:
        """The text of a program whose options are named as the data keys; `value`: what was given, None: nothing."""
        option = f"--{self.key.replace('_', '-')}"
        use_instead = re.sub(r"data\.(\w+)", lambda key: f"--{key[1].replace('_', '-')}", self.use_instead)
        return f"{option if value is None else f'{option} {value}'}: {self.reason}; {use_instead}"

    def __reduce__(self) -> tuple[type[TokenizerError], tuple[str, str, str]]:
        """Pickled by its parts, so that it survives the way back from a worker process."""
        return type(self), (self.reason, self.use_instead, self.key)


class Backend(Protocol):
    """One kind of tokenizer. No text gives `eod_id`: a document cannot end itself."""

    eod_id: int
    """The id that ends a document."""
    vocab_size: int
    """Largest id + 1, which is more than the number of tokens where the vocabulary has holes."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of each text, [num_tokens], of any integer dtype."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens show as their names."""
