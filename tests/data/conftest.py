"""What the data tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_fp8.data.tokenizer import Tokenizer, train_bpe

TEXTS = [
    "def add(first, second):\n    return first + second\n",
    "The quick brown fox jumps over the lazy dog.\n" * 3,
    "Füße, naïve, 東京, \N{OLD ITALIC LETTER A}\n",
    "for index in range(10):\n    print(index, index ** 2)\n",
]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level BPE of at most 300 tokens."""
    return train_bpe(TEXTS, 300, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes records, one a line."""

    def write(records: Sequence[object], name: str = "input.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    return write
