"""What the config's validation keys mean: which samples are read of which file, under which name and weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fp8.config.schema import Config
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.device import prepare
from megatron_fp8.prepare.token_file_writer import TokenFileWriter
from megatron_fp8.prepare.train_tokenizer import train_bpe
from megatron_fp8.report.console import format_record

prepare()  # Megatron Core is imported below

from megatron_fp8.data.dataset import build_datasets  # noqa: E402

SEQ_LENGTH, BATCH, EVAL_ITERS = 8, 4, 2
# First id of a file's tokens, so that each tells which file it is of.
FILES = {"train": 1, "wiki_text_document": 100, "code_text_document": 200}
NUM_TOKENS = {"train": 400, "wiki_text_document": 90, "code_text_document": 330}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return train_bpe(["some text"], 300, tmp_path / "tokenizer.json")


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    for name, first in FILES.items():
        with TokenFileWriter(tmp_path / name, 300) as writer:
            for _ in range(NUM_TOKENS[name] // 10):
                writer.add_documents(np.arange(first, first + 10).astype(writer.dtype), [10])

    def make(valid: list[str], **training: Any) -> Config:
        sizes = {"micro_batch_size": 1, "global_batch_size": BATCH, "train_iters": 1, "eval_iters": EVAL_ITERS}
        named = [str(tmp_path / entry) if entry in FILES else entry for entry in valid]
        model = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": SEQ_LENGTH}
        return Config.model_validate(
            {
                "run": {"name": "test"},
                "model": model,
                "training": {**sizes, **training},
                "optimizer": {"lr": 1e-3},
                "data": {"train_data_path": [str(tmp_path / "train")], "valid_data_path": named},
            }
        )

    return make


BOTH = ["wiki_text_document", "code_text_document"]
WEIGHTED = ["3", BOTH[0], "1", BOTH[1]]


def files_read(validation_set: Any) -> set[str]:
    """The files whose tokens are in a set's samples."""
    found = set()
    for index in range(validation_set.num_samples):
        sample = validation_set.dataset[index]
        ids = sample["labels"][sample["loss_mask"] > 0].tolist()
        found |= {name for name, first in FILES.items() if any(first <= token < first + 10 for token in ids)}
    return found


def test_several_files_are_one_blend_unless_asked_otherwise(make_config, tokenizer) -> None:
    (only,) = build_datasets(make_config(BOTH), tokenizer).valid
    assert (only.name, only.num_samples, only.weight) == (None, EVAL_ITERS * BATCH, None)
    assert files_read(only) == set(BOTH)


@pytest.mark.parametrize(("entries", "weights"), [(BOTH, [None, None]), (WEIGHTED, [0.75, 0.25])])
def test_each_file_has_samples_of_its_own(make_config, tokenizer, entries: list[str], weights: list) -> None:
    sets = build_datasets(make_config(entries, multiple_validation_sets=True), tokenizer).valid
    assert [one.name for one in sets] == ["wiki", "code"]
    assert [one.weight for one in sets] == weights
    for one, file in zip(sets, BOTH, strict=True):
        assert one.num_samples == EVAL_ITERS * BATCH
        assert files_read(one) == {file}
    again = build_datasets(make_config(entries, multiple_validation_sets=True), tokenizer).valid
    for one, other in zip(sets, again, strict=True):
        assert all((one.dataset[i]["tokens"] == other.dataset[i]["tokens"]).all() for i in range(one.num_samples))


@pytest.mark.parametrize("named", [False, True])
def test_full_validation_reads_every_token_once(make_config, tokenizer, named: bool) -> None:
    config = make_config(BOTH, full_validation=True, multiple_validation_sets=named)
    sets = build_datasets(config, tokenizer).valid
    assert [one.name for one in sets] == (["wiki", "code"] if named else [None, None])
    for one, file in zip(sets, BOTH, strict=True):
        assert one.num_samples % BATCH == 0
        assert files_read(one) == {file}
        counted = sum(int(one.dataset[i]["loss_mask"].sum()) for i in range(one.num_samples))
        assert counted == NUM_TOKENS[file]


def test_without_evaluation_there_are_no_sets(make_config, tokenizer) -> None:
    config = make_config(BOTH, eval_iters=0, full_validation=True, multiple_validation_sets=True)
    assert build_datasets(config, tokenizer).valid == ()


def test_the_console_shows_every_set() -> None:
    losses = {"lm loss validation": 3.5, "lm loss validation ppl": 33.1, "lm loss validation/wiki": 3.25}
    record = {"event": "validation", "iteration": 5, **losses, "lm loss validation ppl/wiki": 25.8}
    assert format_record(record, 40) == "iteration 5/40 | lm loss validation 3.5000 | lm loss validation/wiki 3.2500"
