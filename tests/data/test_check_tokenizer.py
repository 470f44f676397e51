"""A config's tokenizer of any kind is checked before a run; what is wrong names its key."""

import pytest

from megatron_fp8.config.schema import Config
from megatron_fp8.data.check_data import check_data
from megatron_fp8.data.tokenizer import Tokenizer


def config_of(**data: str | None) -> Config:
    """A config with no token files."""
    sections = {
        "run": {"name": "test"},
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8},
        "training": {"train_iters": 1, "micro_batch_size": 1, "global_batch_size": 1},
        "optimizer": {"lr": 1e-3},
        "data": data,
    }
    return Config.model_validate(sections)


def test_a_tokenizer_without_a_file_has_a_size() -> None:
    assert check_data(config_of(tokenizer_type="ByteLevelTokenizer")).vocab_size == 257


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("eod_token", "</doc>", "has no end-of-document token </doc>"),
        ("tokenizer_model", "nowhere.json", "does not exist"),
        ("tokenizer_type", "ByteLevelTokenizer", "takes no file"),
    ],
)
def test_the_key_at_fault_is_named(key: str, value: str, reason: str, tokenizer: Tokenizer) -> None:
    problems = check_data(config_of(**{"tokenizer_model": tokenizer.path, key: value})).problems
    (problem,) = [problem for problem in problems if reason in problem.reason]
    assert problem.key == ("data.tokenizer_model" if key == "tokenizer_type" else f"data.{key}")
