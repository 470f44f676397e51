"""Validates a config's tokenizer and token files before the ranks start, and token files alone. Imports no torch.

Of a pair: index against data, ids against the vocabulary, ends of documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.config.check import DataReport
from megatron_fp8.config.paths import is_missing, why_unreadable
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.rules_data import NO_FILE_TYPE
from megatron_fp8.config.schema import Config, DataConfig
from megatron_fp8.data.blend import DEFAULT_SPLIT, Blend, DataKeyError, paths_key, train_blend, valid_blend
from megatron_fp8.data.order import samples_in, tokens_read
from megatron_fp8.data.token_file import TokenFileError, TokenIndex, bin_path, read_index
from megatron_fp8.data.tokenizer import Tokenizer, TokenizerError

READ_WHOLE_UP_TO_BYTES = 64 * 2**20
SAMPLE_BYTES = 2**20
NUM_SAMPLES = 64
_RECREATE = "recreate the pair with tools/preprocess_data.py"
_MAX_DOCUMENTS = 1000
_EOD_KEYS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")


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
        problems += check_token_file(prefix, vocab_size, key)
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
        return None, [Problem("training.train_epochs", epochs, reason, use)]
    return _samples(config, blend, epochs), []


def _samples(config: Config, blend: Blend, epochs: float) -> int:
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


def bytes_read_for_ids(prefix: str) -> int:
    """How many bytes of a `.bin` `check_token_file` reads without `read_all`."""
    size = bin_path(prefix).stat().st_size
    return size if size <= READ_WHOLE_UP_TO_BYTES else NUM_SAMPLES * SAMPLE_BYTES


def check_token_file(
    prefix: str,
    vocab_size: int | None,
    key: str = "data.train_data_path",
    read_all: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> list[Problem]:
    """What is wrong with the pair `PREFIX.bin`, `PREFIX.idx`: missing, corrupt, mismatched, ids outside the vocabulary.

    Up to 64 MiB of `.bin` all ids are read; of a larger file 64 evenly spaced MiB, including the first and the last,
    unless `read_all`: another tokenizer's file shows in any of them, and a full read costs minutes. `vocab_size` None:
    ids must not be negative. `on_bytes` gets the number of bytes of each part that was read.
    """
    try:
        index = read_index(prefix)
    except TokenFileError as error:
        return [Problem(key, prefix, str(error), f"name an existing prefix, or {_RECREATE}")]
    reason = why_mismatched(prefix, index)
    if reason is not None:
        return [Problem(key, prefix, reason, _RECREATE)]
    found = _id_outside(prefix, index, vocab_size, read_all, on_bytes)
    if found is None:
        return []
    token_id, position = found
    ends = np.cumsum(index.lengths_tokens, dtype=np.int64)
    document = int(np.searchsorted(ends, position, side="right"))
    vocabulary = "" if vocab_size is None else f", but the vocabulary has {vocab_size} tokens"
    reason = (
        f"it holds token id {token_id}{vocabulary}: it was made with another tokenizer or is corrupt (token {position} "
        f"of the file, in document {document})"
    )
    use = "set data.tokenizer_model to the tokenizer that made the file, or recreate the file"
    return [Problem(key, prefix, reason, use)]


def why_mismatched(prefix: str, index: TokenIndex) -> str | None:
    """Why `.idx` and `.bin` do not belong together, if so."""
    path = bin_path(prefix)
    if is_missing(path):
        return f"{path} does not exist, but its index does"
    if reason := why_unreadable(path):
        return reason
    lengths = index.lengths_tokens.astype(np.int64)
    if len(lengths) == 0:
        return f"{path} has no documents"
    if lengths.min() < 0:
        return f"the index of {path} has a document of {lengths.min()} tokens"
    size_bytes, expected_bytes = path.stat().st_size, index.num_tokens * index.dtype.itemsize
    if size_bytes != expected_bytes:
        relation = "truncated" if size_bytes < expected_bytes else "too long"
        return (
            f"{path} has {size_bytes} bytes, but its index implies {expected_bytes} ({index.num_tokens} tokens "
            f"of {index.dtype.name}): it is {relation}, or the index belongs to another file"
        )
    if not np.array_equal(index.offsets_bytes, (np.cumsum(lengths) - lengths) * index.dtype.itemsize):
        return f"the index of {path} is corrupt: documents are not contiguous"
    marks = index.document_marks
    if len(marks) == 0 or marks[0] != 0 or marks[-1] != len(lengths) or (np.diff(marks) < 0).any():
        return f"the index of {path} is corrupt: its document marks do not cover its sequences"
    return None


def _id_outside(
    prefix: str, index: TokenIndex, vocab_size: int | None, read_all: bool, on_bytes: Callable[[int], None] | None
) -> tuple[int, int] | None:
    """The first id outside the vocabulary among those that are read, and its position in the file."""
    size = np.iinfo(np.int64).max if vocab_size is None else vocab_size
    for start, part in _parts_to_read(prefix, index.dtype, read_all):
        if len(part) and (int(part.max()) >= size or int(part.min()) < 0):
            place = int(np.flatnonzero((part >= size) | (part < 0))[0])
            return int(part[place]), start + place
        if on_bytes is not None:
            on_bytes(part.nbytes)
    return None


def _parts_to_read(prefix: str, dtype: np.dtype, read_all: bool) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """(position of the first token, tokens) of the parts of a `.bin` that are read."""
    if bin_path(prefix).stat().st_size == 0:
        return
    tokens = np.memmap(bin_path(prefix), dtype=dtype, mode="r")
    part_tokens = SAMPLE_BYTES // dtype.itemsize
    if read_all or tokens.nbytes <= READ_WHOLE_UP_TO_BYTES:
        starts = np.arange(0, len(tokens), part_tokens)
    else:
        starts = np.linspace(0, len(tokens) - part_tokens, NUM_SAMPLES).astype(np.int64)
    for start in starts:
        yield int(start), tokens[start : start + part_tokens]


def check_document_ends(data: DataConfig, eod_id: int, prefixes: Iterable[str]) -> list[Problem]:
    """A problem for each file without an `eod_id` at the end of any document, if a key depends on such ends.

    Of many documents 1000, evenly spaced, are read.
    """
    keys = [f"data.{key}" for key in _EOD_KEYS if getattr(data, key)]
    if not keys:
        return []
    problems = []
    for prefix in dict.fromkeys(prefixes):
        num_documents = _documents_without_end(prefix, eod_id)
        if num_documents is not None:
            reason = (
                f"none of {num_documents} documents of {prefix} ends with the tokenizer's end-of-document token, id "
                f"{eod_id}, so the key would have no effect"
            )
            use = f"a file made with tools/preprocess_data.py --append-eod; or {' '.join(f'{k}=false' for k in keys)}"
            problems.append(Problem(keys[-1], True, reason, use))
    return problems


def _documents_without_end(prefix: str, eod_id: int) -> int | None:
    """How many documents were read if none of them ends with `eod_id`; None if one does, or if there are none."""
    index = read_index(prefix)
    lengths = index.lengths_tokens
    with_tokens = np.flatnonzero(lengths)
    if len(with_tokens) == 0:
        return None
    count = min(len(with_tokens), _MAX_DOCUMENTS)
    chosen = with_tokens[np.linspace(0, len(with_tokens) - 1, count).astype(np.int64)]
    tokens = np.memmap(bin_path(prefix), dtype=index.dtype, mode="r")
    last = index.offsets_bytes[chosen] // index.dtype.itemsize + lengths[chosen] - 1
    return None if (tokens[last] == eod_id).any() else count
