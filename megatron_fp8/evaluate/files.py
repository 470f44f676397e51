"""Chooses the token files and the tokenizer for evaluating a checkpoint, and validates them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fp8.checkpoint.saved_model import SavedModel
from megatron_fp8.config.problem import ConfigError, Problem
from megatron_fp8.config.schema import Config
from megatron_fp8.data.blend import Blend, DataKeyError, dataset_names, valid_blend
from megatron_fp8.data.check_data import check_token_file
from megatron_fp8.data.token_file import read_index
from megatron_fp8.data.tokenizer import Tokenizer, TokenizerError
from megatron_fp8.errors import BadInputError


@dataclass(frozen=True)
class EvaluationFile:
    """A token file, its unique name, and the documents to read."""

    name: str
    prefix: str
    documents: range


def model_tokenizer(saved: SavedModel, given: Path | None) -> Tokenizer:
    """The tokenizer `given` with `--tokenizer`, or the run's. Raises BadInputError."""
    data = saved.config.data
    if given is not None:
        data = data.model_copy(update={"tokenizer_model": str(given)})
    try:
        tokenizer = Tokenizer.of(data)
    except TokenizerError as error:
        use = "" if given is not None else ", or use --tokenizer FILE"
        raise BadInputError(f"the tokenizer cannot be used: {error}{use}") from error
    if tokenizer.vocab_size > saved.vocab_size:
        raise BadInputError(
            f"{tokenizer.path} has {tokenizer.vocab_size} tokens, but the model has {saved.vocab_size}: it belongs to "
            "another model. Use the right one with --tokenizer FILE"
        )
    return tokenizer


def evaluation_files(saved: SavedModel, prefixes: Sequence[str]) -> list[EvaluationFile]:
    """The files at `prefixes`; without any, the run's validation files.

    Raises ConfigError with every mistake in them, BadInputError if there are no files.
    """
    chosen, key = list(prefixes), "--data"
    share = None
    if not chosen:
        blend = _own_validation(saved.config)
        chosen, share, key = list(blend.prefixes), blend, "data.valid_data_path"
    chosen = [prefix.removesuffix(".bin").removesuffix(".idx") for prefix in chosen]
    twice = sorted({prefix for prefix in chosen if chosen.count(prefix) > 1})
    problems = [Problem(key, prefix, "duplicate prefix", "each prefix once") for prefix in twice]
    for prefix in dict.fromkeys(chosen):
        problems += check_token_file(prefix, saved.vocab_size, key)
    if problems:
        raise ConfigError.from_problems(problems)
    files = []
    for name, prefix in zip(dataset_names(chosen), chosen, strict=True):
        num_documents = len(read_index(prefix).lengths_tokens)
        documents = range(num_documents) if share is None else share.documents(num_documents)
        files.append(EvaluationFile(name, prefix, documents))
    return files


def _own_validation(config: Config) -> Blend:
    data = config.data
    if not (data.valid_data_path or data.data_path):
        raise BadInputError("the checkpoint's run has no validation files: use --data PREFIX ...")
    try:
        return valid_blend(data)
    except DataKeyError as error:
        raise BadInputError(str(error)) from error
