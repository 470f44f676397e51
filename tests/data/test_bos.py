"""Documents begin with the token that the tokenizer's own library puts before a text, where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from test_preprocess import load_tool, settings_of
from test_tokenizer_kinds import sentencepiece_model
from token_file_reference import decode_token_file
from tokenizers import processors

from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.prepare.input_files import find_inputs
from megatron_fp8.prepare.preprocess import BLOCK_BYTES, digest_of_work
from tests.command_line import exit_code

TEXTS = ["one two", "", "three", "four five six"]
BOS = "<s>"


def with_template(tokenizer: Tokenizer, path: Path, template: bool = True) -> Path:
    """The same tokenizer with a token that begins texts."""
    made = tokenizers.Tokenizer.from_file(str(tokenizer.path))
    made.add_special_tokens([BOS])
    if template:
        made.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, made.token_to_id(BOS))]
        )
    made.save(str(path))
    return path


def prepared(tmp_path: Path, tokenizer: Path, *options: str) -> list[list[int]]:
    """The documents that the tool writes."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    files = ["--input", str(texts), "--output-prefix", str(tmp_path / "out"), "--overwrite"]
    assert exit_code(load_tool("preprocess_data").main, *files, "--tokenizer-model", str(tokenizer), *options) == 0
    return decode_token_file(tmp_path / "out_text_document")


def test_documents_are_what_the_library_encodes(tokenizer: Tokenizer, tmp_path: Path, capsys) -> None:
    path = with_template(tokenizer, tmp_path / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(path))
    loaded = Tokenizer.load(path)
    assert loaded.adds_bos
    expected = [[*library.encode(text).ids, loaded.eod_id] for text in TEXTS if text]
    assert expected[0][0] == loaded.bos_id
    assert prepared(tmp_path, path, "--prepend-bos", "--append-eod") == expected
    said = capsys.readouterr().out
    assert f"documents begin with id {loaded.bos_id} (BOS) and end with id {loaded.eod_id}" in said
    assert "warning" not in said


def test_data_without_the_token_that_the_tokenizer_adds_are_warned_of(tokenizer, tmp_path, capsys) -> None:
    path = with_template(tokenizer, tmp_path / "tokenizer.json")
    documents = prepared(tmp_path, path, "--append-eod")
    assert all(Tokenizer.load(path).bos_id not in document for document in documents)
    assert "puts id" in capsys.readouterr().out
    prepared(tmp_path, Path(tokenizer.path), "--append-eod")
    assert "puts id" not in capsys.readouterr().out


@pytest.mark.parametrize("adds", [True, False, None])
def test_the_files_beside_name_it_too(tokenizer: Tokenizer, tmp_path: Path, adds: bool | None) -> None:
    path = with_template(tokenizer, tmp_path / "tokenizer.json", template=False)
    assert Tokenizer.load(path).bos_id is None
    settings = {"bos_token": {"content": BOS}} | ({} if adds is None else {"add_bos_token": adds})
    path.with_name("tokenizer_config.json").write_text(json.dumps(settings))
    loaded = Tokenizer.load(path)
    assert loaded.bos_id == tokenizers.Tokenizer.from_file(str(path)).token_to_id(BOS)
    assert loaded.adds_bos is (adds is True)
    path.with_name("tokenizer_config.json").write_text(json.dumps({"bos_token": "<unknown>"}))
    assert Tokenizer.load(path).bos_id is None


def test_a_sentencepiece_model_has_its_own(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path / "own.model")
    loaded = Tokenizer.load(path)
    assert (loaded.bos_id, loaded.adds_bos) == (1, True)
    documents = prepared(tmp_path, path, "--prepend-bos")
    assert [document[0] for document in documents] == [1, 1, 1]
    without = Tokenizer.load(sentencepiece_model(tmp_path / "none.model", bos_id=-1))
    assert (without.bos_id, without.adds_bos) == (None, False)


def test_a_tokenizer_without_one_is_refused(tokenizer: Tokenizer, tmp_path: Path, capsys) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("some text")
    files = ["--input", str(texts), "--output-prefix", str(tmp_path / "out"), "--prepend-bos"]
    main = load_tool("preprocess_data").main
    assert exit_code(main, *files, "--tokenizer-model", tokenizer.path) == 2
    assert "--prepend-bos: the tokenizer names no token that begins texts" in capsys.readouterr().err
    assert exit_code(main, *files, "--tokenizer-type", "ByteLevelTokenizer") == 2
    trained = ["--train-bpe", "300", "--tokenizer-model", str(tmp_path / "new.json")]
    assert exit_code(main, *files, *trained) == 2
    assert "--prepend-bos: a tokenizer of --train-bpe has no token" in capsys.readouterr().err


def test_killed_work_with_another_beginning_starts_over(tokenizer: Tokenizer, tmp_path: Path) -> None:
    loaded = Tokenizer.load(with_template(tokenizer, tmp_path / "tokenizer.json"))
    texts = tmp_path / "texts.txt"
    texts.write_text("some text")
    files = find_inputs([str(texts)], "auto", ("text",))
    digests = {
        digest_of_work(files, settings_of(loaded, prepend_bos=prepend), loaded, BLOCK_BYTES)
        for prepend in (True, False)
    }
    assert len(digests) == 2
