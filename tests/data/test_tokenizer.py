"""Text survives the tokenizer, and invalid tokenizer files are refused with a reason."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8.data.tokenizer import END_OF_DOCUMENT, Tokenizer, TokenizerError
from megatron_fp8.prepare.train_tokenizer import train_bpe


@given(text=st.text())
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


@given(before=st.text(), after=st.text())
def test_a_document_cannot_end_itself(tokenizer: Tokenizer, before: str, after: str) -> None:
    text = before + END_OF_DOCUMENT + after
    ids = tokenizer.encode(text)
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode(ids) == text


def test_end_of_document_is_one_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.eod_id]) == END_OF_DOCUMENT
    assert 0 <= tokenizer.eod_id < tokenizer.vocab_size


def test_training_is_deterministic_and_merges(tmp_path: Path) -> None:
    texts = ["to be or not to be " * 20, "that is the question"]
    trained = [train_bpe(texts, 280, tmp_path / f"{number}.json") for number in range(2)]
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "1.json").read_bytes()
    assert 257 < trained[0].vocab_size <= 280
    assert len(trained[0].encode(texts[0])) < len(texts[0]) / 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json"]


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="256 bytes"):
        train_bpe(["text"], 256, tmp_path / "t.json")


def test_vocab_size_covers_the_largest_id_of_a_vocabulary_with_holes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = json.loads(Path(tokenizer.path).read_text(encoding="utf-8"))
    content["model"]["vocab"]["a hole lies before this"] = 70_000
    path = tmp_path / "holes.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert Tokenizer.load(path).vocab_size == 70_001


def invalid(kind: str, good: Path, directory: Path) -> Path:
    """A path that is not a valid tokenizer, in one of several ways."""
    path = directory / "tokenizer.json"
    content = good.read_text(encoding="utf-8")
    if kind == "cut off":
        path.write_text(content[: len(content) // 2], encoding="utf-8")
    elif kind == "binary":
        path.write_bytes(bytes(range(256)))
    elif kind == "another JSON":
        path.write_text('{"hidden_size": 512}', encoding="utf-8")
    elif kind == "directory":
        path.mkdir()
    elif kind == "no end of document":
        path.write_text(content.replace(END_OF_DOCUMENT, "</s>"), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("absent", "does not exist"),
        ("directory", "is a directory"),
        ("cut off", "is not a tokenizer.json"),
        ("binary", "is not a tokenizer.json"),
        ("another JSON", "is not a tokenizer.json"),
        ("no end of document", "has no end-of-document token <|endoftext|>"),
    ],
)
def test_invalid_tokenizer_files_are_refused(kind: str, reason: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = invalid(kind, Path(tokenizer.path), tmp_path)
    with pytest.raises(TokenizerError, match="tokenizer") as caught:
        Tokenizer.load(path)
    assert reason in caught.value.reason
    assert caught.value.use_instead
