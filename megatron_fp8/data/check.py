"""Owns the look at every file that a config names for its data: the one call the command line makes.

Imports no torch, so that it runs before processes start.
"""

from __future__ import annotations

from pathlib import Path

from megatron_fp8.config.check import DataReport
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import Config
from megatron_fp8.data.inspect import check_data_path
from megatron_fp8.data.tokenizer import Tokenizer, TokenizerError

_ANY_TOKEN = 2**63 - 1


def check_data(config: Config) -> DataReport:
    """The tokenizer's size and every mistake of the tokenizer, the token files and the index cache.

    Keys that are not set are not this function's matter (`config/check.py`).
    """
    problems: list[Problem] = []
    vocab_size = None
    if config.data.tokenizer_model is not None:
        try:
            vocab_size = Tokenizer.load(config.data.tokenizer_model).vocab_size
        except TokenizerError as error:
            path = config.data.tokenizer_model
            problems.append(Problem("data.tokenizer_model", path, error.reason, error.use_instead))
    for key, entries in (
        ("data.train_data_path", config.data.train_data_path),
        ("data.valid_data_path", config.data.valid_data_path),
    ):
        if entries:
            problems += check_data_path(entries, vocab_size or _ANY_TOKEN, config.model.seq_length, key)
    cache = config.data.data_cache_path
    if cache is not None and Path(cache).exists() and not Path(cache).is_dir():
        problems.append(Problem("data.data_cache_path", cache, "it is not a directory", "the path of a directory"))
    return DataReport(vocab_size, tuple(problems))
