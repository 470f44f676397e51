"""The comparison with the tokenizers library alone runs both subjects on the same text and counts all processes."""

from pathlib import Path

import pytest

from megatron_fp8.bench import encoding_rate
from megatron_fp8.data.corpus import Document
from megatron_fp8.data.token_file import read_index
from megatron_fp8.data.tokenizer import Tokenizer, train_bpe


def test_both_subjects_encode_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["def one():\n    return 1\n\nprint(one())", "to be or not to be"]
    monkeypatch.setattr(encoding_rate, "read_corpus", lambda: [Document(text[:4], text) for text in texts])
    train_bpe(texts, 270, tmp_path / "own.json")
    said: list[str] = []
    rates = encoding_rate.measure_encoding(tmp_path, 1, 1, True, tmp_path / "own.json", said.append)
    assert rates.num_documents == 3
    assert rates.text_bytes == sum(map(len, texts)) - 2
    for seconds in (rates.by_clock, rates.by_cpu):
        assert all(len(values) == 1 and values[0] != 0 for values in seconds.values())
    tokenizer = Tokenizer.load(tmp_path / "own.json")
    paragraphs = [part for text in texts for part in text.split("\n\n")]
    assert read_index(tmp_path / "out_text_document").lengths_tokens.tolist() == [
        len(tokenizer.encode(part)) + 1 for part in paragraphs
    ]
    assert len(said) == 3
    assert encoding_rate.encoding_table(rates).row_count == 2
