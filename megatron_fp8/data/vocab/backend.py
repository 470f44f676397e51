"""Owns what every kind of tokenizer offers, and the error of one that cannot be used. Knows no kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.data.cuts import Cuts
from megatron_fp8.errors import BadInputError

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


@dataclass(frozen=True)
class FlatIds:
    """Ids of several texts, one text after another."""

    ids: NDArray[np.integer]
    """[sum(lengths)], of any integer dtype."""
    lengths: NDArray[np.int64]
    """Tokens of each text, [num_texts]."""

    @classmethod
    def of(cls, arrays: Sequence[NDArray[np.integer]]) -> FlatIds:
        """From the ids of each text."""
        lengths = np.array([len(ids) for ids in arrays], dtype=np.int64)
        return cls(np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32), lengths)

    @classmethod
    def concatenate(cls, parts: Sequence[FlatIds]) -> FlatIds:
        """The texts of all parts, in their order; there is one part at least."""
        if len(parts) == 1:
            return parts[0]
        return cls(np.concatenate([part.ids for part in parts]), np.concatenate([part.lengths for part in parts]))

    def split(self) -> list[NDArray[np.integer]]:
        """The ids of each text."""
        return np.split(self.ids, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


class Backend(Protocol):
    """One kind of tokenizer. No text gives `eod_id`: a document cannot end itself."""

    eod_id: int
    """The id that ends a document."""
    vocab_size: int
    """Largest id + 1, which is more than the number of tokens where the vocabulary has holes."""

    cuts: Cuts | None
    """Where a text may be cut; None: nowhere."""

    def encode(self, texts: Sequence[str]) -> FlatIds:
        """Ids of all texts."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens show as their names."""
