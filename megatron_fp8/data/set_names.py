"""Owns the names that datasets are told apart by in series and tables. Imports no torch and opens no file."""

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath


def dataset_names(prefixes: Sequence[str]) -> list[str]:
    """A name for each of these different prefixes: as many of its last path parts as tell it from the others.

    Preprocessing ends every prefix in `_document`, often in `_text_document`; what all of several names end in is left
    out of them.
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
            return _without_ending(names) if len(counts) == len(names) else list(prefixes)
        lengths = longer


def _without_ending(names: list[str]) -> list[str]:
    for ending in ("_text_document", "_document"):
        shorter = [name.removesuffix(ending) for name in names]
        ended = all(name.endswith(ending) and PurePath(name).name != ending for name in names)
        if ended and len(set(shorter)) == len(names):
            return shorter
    return names
