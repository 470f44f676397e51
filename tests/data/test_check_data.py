"""Validating a config's files before a run: every file, every problem, and the numbers that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fp8.config.places import place_problems
from megatron_fp8.config.schema import Config
from megatron_fp8.data import check_data as check_data_module
from megatron_fp8.data.check_data import check_data
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.prepare.token_file_writer import TokenFileWriter

SEQ_LENGTH = 16


def write(prefix: Path, lengths: list[int], token: int = 7) -> str:
    """A token file of one token, repeated."""
    with TokenFileWriter(prefix, vocab_size=300) as writer:
        writer.add_documents(np.full(sum(lengths), token, dtype=writer.dtype), lengths)
    return str(prefix)


@pytest.fixture
def make_config(tokenizer: Tokenizer) -> Callable[..., Config]:
    """A config with these data keys; `training` changes by keyword too."""

    def make(training: dict[str, Any] | None = None, **data: Any) -> Config:
        return Config.model_validate(
            {
                "run": {"name": "test"},
                "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": SEQ_LENGTH},
                "training": {"micro_batch_size": 1, "global_batch_size": 2, "eval_iters": 1} | (training or {}),
                "optimizer": {"lr": 1e-3},
                "data": {"tokenizer_model": tokenizer.path} | data,
            }
        )

    return make


MakeConfig = Callable[..., Config]


def test_whole_files_are_counted(make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    train = [write(tmp_path / "a", [100, 61]), write(tmp_path / "b", [33])]
    report = check_data(make_config(train_data_path=train, valid_data_path=[write(tmp_path / "c", [40])]))
    assert report.problems == ()
    assert report.vocab_size == tokenizer.vocab_size
    assert report.notes == ("train: 2 files, 194 tokens, 12 samples per epoch", "valid: 1 file, 40 tokens")


def test_every_file_is_validated(make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    good, cut, foreign = write(tmp_path / "good", [100]), write(tmp_path / "cut", [100]), str(tmp_path / "foreign")
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-2])
    write(tmp_path / "foreign", [100], token=tokenizer.vocab_size)
    blend = ["0.5", good, "0.3", cut, "0.2", str(tmp_path / "absent")]
    report = check_data(make_config(train_data_path=blend, valid_data_path=[foreign]))
    assert [(problem.key, problem.value) for problem in report.problems] == [
        ("data.train_data_path", cut),
        ("data.train_data_path", str(tmp_path / "absent")),
        ("data.valid_data_path", foreign),
    ]


def test_invalid_lists_and_a_bad_tokenizer_are_all_reported(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(
        train_data_path=["0.5", "a", "b"], valid_data_path=["a.bin"], tokenizer_model=str(tmp_path / "no.json")
    )
    assert [problem.key for problem in check_data(config).problems] == [
        "data.tokenizer_model",
        "data.train_data_path",
        "data.valid_data_path",
    ]


@pytest.mark.parametrize(("length", "is_enough"), [(SEQ_LENGTH + 1, True), (SEQ_LENGTH, False)])
def test_a_sample_needs_one_token_more(length: int, is_enough: bool, make_config: MakeConfig, tmp_path: Path) -> None:
    problems = check_data(make_config(train_data_path=[write(tmp_path / "a", [length])])).problems
    if is_enough:
        assert problems == ()
    else:
        assert "it has 16 tokens; one sample needs seq_length + 1 = 17" in problems[0].reason
        assert "model.seq_length=15" in problems[0].use_instead


def test_a_share_without_enough_text_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [30] * 10)
    assert check_data(make_config(data_path=[prefix], split="8,2")).problems == ()
    (problem,) = check_data(make_config(data_path=[prefix])).problems
    assert (problem.key, problem.value) == ("data.split", "969,30,1")
    assert "valid gets 0 with 0 tokens" in problem.reason
    # Without evaluation there need not be a share for it.
    assert check_data(make_config({"eval_iters": 0}, data_path=[prefix])).problems == ()


def test_an_invalid_split_is_one_problem(make_config: MakeConfig, tmp_path: Path) -> None:
    (problem,) = check_data(make_config(data_path=[write(tmp_path / "a", [30] * 10)], split="most")).problems
    assert problem.key == "data.split"


def test_epochs_are_counted_in_samples(make_config: MakeConfig, tmp_path: Path) -> None:
    """One file of 161 tokens has 10 samples, two passes over it 20; a list of files is read once each."""
    prefix, other = write(tmp_path / "a", [100, 61]), write(tmp_path / "b", [17] * 4)
    for paths, epochs, expected in (
        ({"train_data_path": [prefix]}, 1, 10),
        ({"train_data_path": [prefix]}, 2, 20),
        ({"train_data_path": [prefix]}, 0.5, 4),
        ({"train_data_path": [prefix, other]}, 1, 10 + 4),
        ({"train_data_path": ["3", prefix]}, 1, 10),
        ({"data_path": [other], "split": "3,1"}, 1, 3),
        ({"train_data_path": [prefix]}, None, None),
    ):
        report = check_data(make_config({"train_epochs": epochs}, **paths))
        assert report.problems == ()
        assert report.epoch_samples == expected, (paths, epochs)


def test_a_blend_with_weights_has_no_epochs(make_config: MakeConfig, tmp_path: Path) -> None:
    blend = ["1", write(tmp_path / "a", [100]), "1", write(tmp_path / "b", [100])]
    report = check_data(make_config({"train_epochs": 1}, train_data_path=blend))
    assert report.epoch_samples is None
    assert [problem.key for problem in report.problems] == ["training.train_epochs"]
    assert "training.train_samples" in report.problems[0].use_instead


def test_what_was_not_checked_is_reported(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_data_module, "READ_WHOLE_UP_TO_BYTES", 2**20)
    monkeypatch.setattr(check_data_module, "SAMPLE_BYTES", 2**14)
    prefix = write(tmp_path / "a", [2**20])
    note = check_data(make_config(train_data_path=[prefix])).notes[-1]
    assert note == f"token ids of {prefix}: 1 of 2 MiB checked; tools/data.py verify checks all"


def test_a_cache_that_is_a_file_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = make_config(train_data_path=[write(tmp_path / "a", [100])], data_cache_path=str(tmp_path / "file"))
    assert [problem.key for problem in place_problems(config)] == ["data.data_cache_path"]
