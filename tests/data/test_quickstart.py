"""The quickstart's directory is complete or made again."""

from pathlib import Path

import pytest
from token_file_reference import decode_token_file

from megatron_fp8.data.check_data import check_token_file
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.prepare import quickstart
from megatron_fp8.prepare.quickstart import COMPLETE_FILE, DATA_FILES, Document, complete_summary, prepare

VOCAB_SIZE = 400


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> list[Document]:
    """A corpus of a few thousand words in place of the standard library."""
    made = [Document(f"file{i}.py", f"def function{i}():\n    return {i}\n" * 5) for i in range(100)]
    monkeypatch.setattr(quickstart, "read_corpus", lambda: made)
    return made


def test_files_hold_the_corpus(documents: list[Document], tmp_path: Path) -> None:
    progress = []
    summary = prepare(tmp_path, VOCAB_SIZE, lambda *step: progress.append(step))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    for split in ("train", "valid"):
        assert check_token_file(str(tmp_path / split), tokenizer.vocab_size) == []
        expected = [
            [*tokenizer.encode(document.text), tokenizer.eod_id]
            for document in documents
            if document.is_validation == (split == "valid")
        ]
        assert decode_token_file(tmp_path / split) == expected
        assert summary.num_documents[split] == len(expected)
        assert summary.num_tokens[split] == sum(map(len, expected))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*DATA_FILES, COMPLETE_FILE])
    assert progress[-1] == ("encoding valid", summary.text_bytes, summary.text_bytes)
    assert complete_summary(tmp_path, VOCAB_SIZE) == summary


def test_the_same_text_gives_the_same_bytes(documents: list[Document], tmp_path: Path) -> None:
    for name in ("a", "b"):
        prepare(tmp_path / name, VOCAB_SIZE, lambda *step: None)
    for name in DATA_FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_another_vocabulary_is_not_complete(documents: list[Document], tmp_path: Path) -> None:
    assert complete_summary(tmp_path, VOCAB_SIZE) is None
    prepare(tmp_path, VOCAB_SIZE, lambda *step: None)
    assert complete_summary(tmp_path, VOCAB_SIZE + 1) is None


@pytest.mark.parametrize("stage", ["training the tokenizer", "encoding train", "encoding valid"])
def test_an_interrupted_preparation_is_repaired(stage: str, documents: list[Document], tmp_path: Path) -> None:
    def interrupt(begun: str, done_bytes: int, total_bytes: int) -> None:
        if begun == stage:
            raise KeyboardInterrupt

    prepare(tmp_path / "whole", VOCAB_SIZE, lambda *step: None)
    prepare(tmp_path / "again", VOCAB_SIZE, lambda *step: None)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "again", VOCAB_SIZE, interrupt)
    assert complete_summary(tmp_path / "again", VOCAB_SIZE) is None
    prepare(tmp_path / "again", VOCAB_SIZE, lambda *step: None)
    for name in (*DATA_FILES, COMPLETE_FILE):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("name", [*DATA_FILES, COMPLETE_FILE])
@pytest.mark.parametrize("corruption", ["removed", "truncated"])
def test_corruption_is_noticed(name: str, corruption: str, documents: list[Document], tmp_path: Path) -> None:
    prepare(tmp_path, VOCAB_SIZE, lambda *step: None)
    path = tmp_path / name
    if corruption == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-10])
    assert complete_summary(tmp_path, VOCAB_SIZE) is None
