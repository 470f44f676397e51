"""What preprocessing writes is what Megatron Core's builder writes of the same ids, and Megatron Core reads it."""

import json
from pathlib import Path

import pytest
import tokenizers
from token_file_reference import decode_token_file

from megatron_fp8.device import prepare
from megatron_fp8.prepare import token_file_writer
from megatron_fp8.prepare.encode import Settings, TokenizerFile
from megatron_fp8.prepare.input_files import find_inputs
from megatron_fp8.prepare.preprocess import preprocess

prepare()  # Megatron Core is imported below

import torch  # noqa: E402
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@pytest.mark.parametrize("largest_id", [3, 65_498, 65_499, 65_535, 65_536, 200_000])
def test_bytes_are_those_of_megatrons_builder(largest_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several parts of an index, as with millions of documents.
    monkeypatch.setattr(token_file_writer, "_CHUNK_DOCUMENTS", 3)
    words = {"<|endoftext|>": 0, "a": 1, "b": 2, "c": largest_id}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    texts = ["a b c", "c", "b b", "c a", "a", "b c c", "a b"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = Settings(TokenizerFile(str(tmp_path)), append_eod=True)
    preprocess(find_inputs([str(tmp_path / "in.jsonl")], "auto", ["text"]), str(tmp_path / "ours"), settings)

    documents = [[*(words[word] for word in text.split()), 0] for text in texts]
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(largest_id + 1))
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        ours = tmp_path / f"ours_text_document.{suffix}"
        assert ours.read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    dataset = IndexedDataset(str(tmp_path / "ours_text_document"))
    assert [dataset[number].tolist() for number in range(len(dataset))] == documents
    assert decode_token_file(tmp_path / "ours_text_document") == documents
