"""Parses `data.*_data_path` lists (prefixes, or weight, prefix, weight, prefix, ...) and splits such as 969,30,1.

Imports no torch and opens no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import PurePath

from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import DataConfig

DEFAULT_SPLIT = "969,30,1"
# Sums and shares of numbers within it are exact enough to count samples and documents.
_MAX_WEIGHT = 1e9


class BlendError(Exception):
    """A list of data paths or a split is invalid; `reason` says why, `use_instead` what to write."""

    def __init__(self, reason: str, use_instead: str) -> None:
        super().__init__(f"{reason}; {use_instead}")
        self.reason = reason
        self.use_instead = use_instead


class DataKeyError(Exception):
    """A data key is invalid; `problem` says which and why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.key} = {problem.value}: {problem.reason}; {problem.use_instead}")
        self.problem = problem


@dataclass(frozen=True)
class Blend:
    """Prefixes of token files and their weights (any positive scale); None: in proportion to their tokens."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    share: tuple[float, float] = (0.0, 1.0)
    """Which of each prefix's documents are read: from and to, as fractions of their number."""

    def documents(self, num_documents: int) -> range:
        """Which of a prefix's `num_documents` documents are read; rounded as in Megatron."""
        begin, end = (round(part * num_documents) for part in self.share)
        return range(begin, end)


def paths_key(data: DataConfig, name: str) -> str:
    """The key that names the files of `name`, "train" or "valid"."""
    return "data.data_path" if data.data_path else f"data.{name}_data_path"


def train_blend(data: DataConfig) -> Blend:
    """What training reads. Raises DataKeyError for invalid keys."""
    return _blend(data, "train", data.train_data_path)


def valid_blend(data: DataConfig) -> Blend:
    """What validation reads. Raises DataKeyError for invalid keys."""
    return _blend(data, "valid", data.valid_data_path)


def _blend(data: DataConfig, name: str, entries: list[str]) -> Blend:
    key: str = paths_key(data, name)
    value: list[str] | str = list(data.data_path or entries)
    try:
        blend = parse_blend(data.data_path or entries)
        if data.data_path:
            key, value = "data.split", data.split or DEFAULT_SPLIT
            train, valid, _ = parse_split(value)
            blend = replace(blend, share=train if name == "train" else valid)
    except BlendError as error:
        raise DataKeyError(Problem(key, value, error.reason, error.use_instead)) from error
    return blend


def parse_blend(entries: Sequence[str]) -> Blend:
    """The blend in a config's list, read as Megatron reads `--train-data-path`.

    It is weighted when its length is even and every other entry, from the first, is a number. Raises BlendError for an
    empty list, missing or non-positive weights, a prefix named twice, and a prefix with a suffix.
    """
    if not entries:
        raise BlendError("no data path is given", "name the prefix of a token file (its path without .bin)")
    weights = [_number_of(entry) for entry in entries[0::2]]
    if len(entries) % 2 == 0 and all(weight is not None for weight in weights):
        blend = Blend(tuple(entries[1::2]), tuple(weight for weight in weights if weight is not None))
    else:
        blend = Blend(tuple(entries), None)
    for prefix in blend.prefixes:
        _check_prefix(prefix, blend.prefixes)
    for prefix, weight in zip(blend.prefixes, blend.weights or (), strict=False):
        if not 1 / _MAX_WEIGHT <= weight <= _MAX_WEIGHT:
            use = f"use a positive weight, from {1 / _MAX_WEIGHT:g} to {_MAX_WEIGHT:g}, or leave it out"
            raise BlendError(f"the weight of {prefix} is {weight}", use)
    return blend


def parse_split(split: str) -> tuple[tuple[float, float], ...]:
    """The shares of training, validation and test in `split`, read as Megatron reads `--split`.

    "969,30,1" gives (0, 0.969), (0.969, 0.999), (0.999, 1): parts of each prefix's documents, in file order.
    Missing numbers are 0. Raises BlendError for anything but one to three numbers with a sum above 0.
    """
    numbers = [_number_of(part) for part in split.split(",")]
    parts = [number for number in numbers if number is not None and 0 <= number <= _MAX_WEIGHT]
    if not len(parts) == len(numbers) <= 3 or sum(parts) == 0:
        raise BlendError(
            f"not one to three numbers from 0 to {_MAX_WEIGHT:g}", "use 969,30,1: training, validation, test"
        )
    ends = list(accumulate(part / sum(parts) for part in parts))
    ends = [0.0, *ends, *[ends[-1]] * (3 - len(ends))]
    return tuple(pairwise(ends))


def _check_prefix(prefix: str, prefixes: tuple[str, ...]) -> None:
    if _number_of(prefix) is not None:
        raise BlendError(
            f"{prefix} is a number where a path is expected: weights and prefixes do not alternate",
            "write weight, prefix, weight, prefix, ... or prefixes only",
        )
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix):
            raise BlendError(f"{prefix} names one file of the pair", f"use {prefix.removesuffix(suffix)}")
    if prefixes.count(prefix) > 1:
        raise BlendError(f"{prefix} is listed more than once", "list each prefix once; raise its weight")


def _number_of(entry: str) -> float | None:
    try:
        return float(entry)
    except ValueError:
        return None


def dataset_names(prefixes: Sequence[str]) -> list[str]:
    """A short name for each of these prefixes: the fewest trailing path parts that are unique.

    Preprocessing ends every prefix in `_document`, often in `_text_document`; a suffix that all names share is removed.
    """
    parts = [PurePath(prefix).parts for prefix in prefixes]
    lengths = [1] * len(parts)
    while True:
        names = ["/".join(part[-length:]) for part, length in zip(parts, lengths, strict=True)]
        counts = Counter(names)
        longer = [
            length + (counts[name] > 1 and length < len(part))
            for part, length, name in zip(parts, lengths, names, strict=True)
        ]
        if longer == lengths:
            # Two spellings of one path have the same parts.
            return _without_suffix(names) if len(counts) == len(names) else list(prefixes)
        lengths = longer


def _without_suffix(names: list[str]) -> list[str]:
    for suffix in ("_text_document", "_document"):
        shorter = [name.removesuffix(suffix) for name in names]
        is_shared = all(name.endswith(suffix) and PurePath(name).name != suffix for name in names)
        if is_shared and len(set(shorter)) == len(names):
            return shorter
    return names
