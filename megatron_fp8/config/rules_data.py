"""Owns which data keys a run needs. What the files hold is the data part's matter. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.facts import Alternative, Facts, Finding

TOKENIZER = "data.tokenizer_model"


def check_data_keys(facts: Facts) -> Iterator[Finding]:
    """Every key without which no batch can be made."""
    config = facts.config
    prefixes = "the prefix of a token file (its path without .bin), or weight, prefix, weight, prefix, ..."
    if not config.data.train_data_path:
        yield Finding("training text", "data.train_data_path", "there is nothing to train on", (), prefixes)
    if not config.data.valid_data_path and config.training.eval_iters > 0:
        yield Finding(
            "validation text",
            "data.valid_data_path",
            f"training.eval_iters={config.training.eval_iters} asks for evaluation, and there is no text for it",
            (Alternative("training.eval_iters", [0]),),
            prefixes,
        )
    if config.data.tokenizer_model is None:
        reason = "the vocabulary and the token that ends documents come from it"
        yield Finding("tokenizer", TOKENIZER, reason, (), "the path of a tokenizer.json")
