"""Fixtures of the data tests."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_fp8.data.tokenizer import END_OF_DOCUMENT, Tokenizer
from megatron_fp8.prepare.train_tokenizer import train_bpe

# GPT-2's letter for each byte: printable ones stand for themselves, the others for letters from 256 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
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
    """Writes records, one per line."""

    def write(records: Sequence[object], name: str = "input.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def ranks(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The byte-level BPE of the other tests as a rank file: ranks are its ids less one, that of `<|endoftext|>`."""
    vocabulary = json.loads(Path(tokenizer.path).read_text(encoding="utf-8"))["model"]["vocab"]
    path = tmp_path_factory.mktemp("ranks") / "own.tiktoken"
    with path.open("wb") as stream:
        for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
            if token != END_OF_DOCUMENT:
                content = bytes(BYTE_OF_LETTER[letter] for letter in token)
                stream.write(base64.b64encode(content) + f" {number - 1}\n".encode())
    return path
