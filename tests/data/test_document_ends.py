"""Files without end-of-document tokens are refused if a key depends on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_fp8.config.schema import DataConfig
from megatron_fp8.data.check_data import check_document_ends
from megatron_fp8.prepare.token_file_writer import TokenFileWriter

EOD = 9


def write(prefix: Path, documents: list[list[int]]) -> str:
    with TokenFileWriter(prefix, vocab_size=300) as writer:
        tokens = np.concatenate([np.array(document, dtype=writer.dtype) for document in documents])
        writer.add_documents(tokens, [len(document) for document in documents])
    return str(prefix)


@pytest.mark.parametrize("key", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_a_file_without_end_tokens_is_refused_if_a_key_needs_them(key: str, tmp_path: Path) -> None:
    # An end inside a document is text: documents end where the index says.
    without = write(tmp_path / "without", [[1, EOD, 2], [], [3]])
    ended = write(tmp_path / "ended", [[1, 2], [], [3, EOD]])
    (problem,) = check_document_ends(DataConfig(**{key: True}), EOD, [without, ended, without])
    assert (problem.key, problem.value) == (f"data.{key}", True)
    assert f"none of 2 documents of {without} ends with" in problem.reason
    assert "--append-eod" in problem.use_instead
    assert f"data.{key}=false" in problem.use_instead
    assert check_document_ends(DataConfig(), EOD, [without]) == []


def test_of_many_documents_some_are_read(tmp_path: Path) -> None:
    documents = [[1, EOD]] + [[1]] * 5000
    assert check_document_ends(DataConfig(eod_mask_loss=True), EOD, [write(tmp_path / "one", documents)]) == []
    (problem,) = check_document_ends(DataConfig(eod_mask_loss=True), EOD, [write(tmp_path / "none", documents[1:])])
    assert "of 1000 documents" in problem.reason
