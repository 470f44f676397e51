"""Owns the meaning of a data path list: prefixes of token files, or weight, prefix, weight, prefix, ...; and of a split
of their documents into training, validation and test, such as 969,30,1.

Imports no torch and opens no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# Sums and shares of numbers within it are exact enough to count samples and documents by.
_MOST_WEIGHT = 1e9


class BlendError(Exception):
    """A list of data paths has no meaning; `reason` says why, `use_instead` what to write."""

    def __init__(self, reason: str, use_instead: str) -> None:
        super().__init__(f"{reason}; {use_instead}")
        self.reason = reason
        self.use_instead = use_instead


@dataclass(frozen=True)
class Blend:
    """Prefixes of token files and their weights (any positive scale); None: in proportion to their tokens."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    share: tuple[float, float] = (0.0, 1.0)
    """From where to where each prefix's documents are read, as parts of their number."""

    def documents(self, num_documents: int) -> range:
        """Which of a prefix's `num_documents` documents are read; rounded as Megatron does."""
        begin, end = (round(part * num_documents) for part in self.share)
        return range(begin, end)


def parse_blend(entries: Sequence[str]) -> Blend:
    """The blend that a config's list spells, read as Megatron reads `--train-data-path`.

    It is weighted when its length is even and every first of two entries is a number.

    Raises BlendError for an empty list, for weights that are missing for some prefixes or not positive, for a
    prefix named twice and for a prefix that carries its suffix.
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
        if not 1 / _MOST_WEIGHT <= weight <= _MOST_WEIGHT:
            use = f"use a positive weight, from {1 / _MOST_WEIGHT:g} to {_MOST_WEIGHT:g}, or leave it out"
            raise BlendError(f"the weight of {prefix} is {weight}", use)
    return blend


def parse_split(split: str) -> tuple[tuple[float, float], ...]:
    """The shares of training, validation and test that `split` spells, read as Megatron reads `--split`.

    "969,30,1" gives (0, 0.969), (0.969, 0.999), (0.999, 1): parts of each prefix's documents, in the file's order.
    Numbers that are missing are 0. Raises BlendError for anything but one to three numbers with a sum above 0.
    """
    numbers = [_number_of(part) for part in split.split(",")]
    parts = [number for number in numbers if number is not None and 0 <= number <= _MOST_WEIGHT]
    if not len(parts) == len(numbers) <= 3 or sum(parts) == 0:
        raise BlendError(
            f"it is not one to three numbers from 0 to {_MOST_WEIGHT:g}", "use 969,30,1: training, validation, test"
        )
    ends = list(accumulate(part / sum(parts) for part in parts))
    ends = [0.0, *ends, *[ends[-1]] * (3 - len(ends))]
    return tuple(pairwise(ends))


def _check_prefix(prefix: str, prefixes: tuple[str, ...]) -> None:
    if _number_of(prefix) is not None:
        raise BlendError(
            f"{prefix} is a number where a path belongs: weights and prefixes do not alternate",
            "write weight, prefix, weight, prefix, ... or prefixes alone",
        )
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix):
            raise BlendError(f"{prefix} names one file of the pair", f"use {prefix.removesuffix(suffix)}")
    if prefixes.count(prefix) > 1:
        raise BlendError(f"{prefix} is named more than once", "name each prefix once; raise its weight")


def _number_of(entry: str) -> float | None:
    try:
        return float(entry)
    except ValueError:
        return None
