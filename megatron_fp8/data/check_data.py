"""Validates a config's tokenizer and token files before the ranks start. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fp8.config.check import DataReport
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.rules_data import NO_FILE_TYPE
from megatron_fp8.config.schema import Config
from megatron_fp8.data.blend import DEFAULT_SPLIT, Blend, DataKeyError, paths_key, train_blend, valid_blend
from megatron_fp8.data.order import samples_in, tokens_read
from megatron_fp8.data.token_file import bin_path, read_index
from megatron_fp8.data.tokenizer import Tokenizer, TokenizerError
from megatron_fp8.data.validate_tokens import bytes_read_for_ids, check_document_ends, check_token_file

_ANY_VOCAB_SIZE = 2**63 - 1
EPOCHS = "training.train_epochs"


@dataclass(frozen=True)
class _Part:
    """What training or validation reads."""

    name: str
    key: str
    blend: Blend


def check_data(config: Config) -> DataReport:
    """The tokenizer's size and every problem of the tokenizer and the token files.

    Missing keys and the directory of the index cache are checked elsewhere (`config/`).
    """
    problems: list[Problem] = []
    vocab_size = eod_id = None
    if config.data.tokenizer_model is not None or config.data.tokenizer_type == NO_FILE_TYPE:
        try:
            tokenizer = Tokenizer.of(config.data)
            vocab_size, eod_id = tokenizer.vocab_size, tokenizer.eod_id
        except TokenizerError as error:
            value = getattr(config.data, error.key)
            problems.append(Problem(f"data.{error.key}", value, error.reason, error.use_instead))
    parts, wrong_keys = _parts(config)
    problems += wrong_keys
    files = {(prefix, part.key): None for part in parts for prefix in part.blend.prefixes}
    for prefix, key in files:
        problems += check_token_file(prefix, vocab_size or _ANY_VOCAB_SIZE, key)
    notes: list[str] = []
    epoch_samples = None
    if not problems:
        problems += [problem for part in parts for problem in _too_short(config, part)]
        if eod_id is not None:
            problems += check_document_ends(config.data, eod_id, (prefix for prefix, _ in files))
        notes = _notes(config, parts)
        if config.training.train_epochs is not None and parts and parts[0].name == "train":
            epoch_samples, wrong_epochs = _epoch_samples(config, parts[0].blend)
            problems += wrong_epochs
    return DataReport(vocab_size, tuple(problems), epoch_samples, tuple(notes))


def _parts(config: Config) -> tuple[list[_Part], list[Problem]]:
    """What the config's keys select, and what is wrong with them."""
    data = config.data
    parts, problems = [], []
    for name, blend_of in (("train", train_blend), ("valid", valid_blend)):
        is_unused = name == "valid" and data.data_path and config.training.eval_iters == 0
        if is_unused or not (data.data_path or getattr(data, f"{name}_data_path")):
            continue
        try:
            parts.append(_Part(name, paths_key(data, name), blend_of(data)))
        except DataKeyError as error:
            if error.problem not in problems:
                problems.append(error.problem)
    return parts, problems


def _too_short(config: Config, part: _Part) -> list[Problem]:
    """Files with too few tokens for one sample in the documents that are read."""
    problems = []
    needed = config.model.seq_length + 1
    for prefix in part.blend.prefixes:
        index = read_index(prefix)
        tokens = tokens_read(part.blend, index)
        if tokens >= needed:
            continue
        seq_length = f"model.seq_length={max(tokens - 1, 1)} or less"
        if not config.data.data_path:
            reason = f"it has {tokens} tokens; one sample needs seq_length + 1 = {needed}"
            problems.append(Problem(part.key, prefix, reason, f"use more text, or {seq_length}"))
            continue
        documents = len(part.blend.documents(len(index.lengths_tokens)))
        reason = (
            f"of the {len(index.lengths_tokens)} documents of {prefix}, {part.name} gets {documents} with {tokens} "
            f"tokens; one sample needs seq_length + 1 = {needed}"
        )
        use = f"a larger share for {part.name}, more text, or {seq_length}"
        problems.append(Problem("data.split", config.data.split or DEFAULT_SPLIT, reason, use))
    return problems


def _epoch_samples(config: Config, blend: Blend) -> tuple[int | None, list[Problem]]:
    """The samples of `train_epochs` epochs; a blend with weights has no epochs."""
    epochs = config.training.train_epochs
    assert epochs is not None
    if blend.weights is not None and len(blend.prefixes) > 1:
        reason = "a weighted blend has no epochs: its weights determine how often each file is read"
        use = "training.train_samples or training.train_iters; or prefixes without weights"
        return None, [Problem(EPOCHS, epochs, reason, use)]
    return _samples(config, blend, epochs), []


def _samples(config: Config, blend: Blend, epochs: float) -> int:
    """The samples of so many passes over each file."""
    tokens = [tokens_read(blend, read_index(prefix)) for prefix in blend.prefixes]
    return sum(samples_in(number, config.model.seq_length, epochs) for number in tokens)


def _notes(config: Config, parts: list[_Part]) -> list[str]:
    """What `--check` prints about valid files."""
    notes = []
    for part in parts:
        tokens = sum(tokens_read(part.blend, read_index(prefix)) for prefix in part.blend.prefixes)
        count = "1 file" if len(part.blend.prefixes) == 1 else f"{len(part.blend.prefixes)} files"
        note = f"{part.name}: {count}, {tokens:,} tokens"
        if part.name == "train" and part.blend.weights is None:
            note += f", {_samples(config, part.blend, 1):,} samples per epoch"
        notes.append(note)
    for prefix in dict.fromkeys(prefix for part in parts for prefix in part.blend.prefixes):
        size, read = bin_path(prefix).stat().st_size, bytes_read_for_ids(prefix)
        if read < size:
            share = f"{read / 2**20:,.0f} of {size / 2**20:,.0f} MiB"
            notes.append(f"token ids of {prefix}: {share} checked; tools/data.py verify checks all")
    return notes
