"""Owns the comparison of characters between the `tokenizers` library, tiktoken and Python.

Each brings a version of Unicode of its own, so a character that is new in one may be a letter for one alone.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np
import tiktoken
from numpy.typing import NDArray
from tokenizers import Regex, normalizers

# The planes that have characters. The others have none that text is made of, and a look at them would take long.
_LOOKED_AT = (range(0xD800), range(0xE000, 0x40000), range(0xE0000, 0xE1000))
_END = 0xE1000


class AgreedCharacters:
    """The characters that belong to the same ones of some classes, as regular expressions name them, for both."""

    def __init__(self, classes: Sequence[str], is_nfc: bool) -> None:
        """`is_nfc`: only those of which Python knows how they are composed, which never changes."""
        points = np.concatenate([np.array(part, dtype="<u4") for part in _LOOKED_AT])
        self._are_agreed = np.zeros(_END + 1, dtype=bool)
        self._are_agreed[points] = True
        for name in classes:
            self._are_agreed &= _same(points.tobytes().decode("utf-32-le"), name)
        if is_nfc:
            known = [point for point in points.tolist() if unicodedata.category(chr(point)) != "Cn"]
            self._are_agreed &= _marks(np.array(known))

    def are_all_of(self, text: str) -> bool:
        """Whether `text` has no others."""
        return bool(self._are_agreed[np.minimum(_points(text), _END)].all())


def _same(everything: str, name: str) -> NDArray[np.bool_]:
    """Where the class `name` holds a character of `everything` for both libraries or for neither."""
    bytes_alone = {bytes((byte,)): byte for byte in range(256)}
    others = normalizers.Replace(Regex(name), "").normalize_str(everything)
    split = tiktoken.Encoding("class", pat_str=f"(?:{name})+", mergeable_ranks=bytes_alone, special_tokens={})
    members = split.encode_to_numpy(everything, disallowed_special=()).astype(np.uint8).tobytes().decode()
    return _marks(_points(others)) != _marks(_points(members))


def _points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def _marks(points: NDArray[np.integer]) -> NDArray[np.bool_]:
    marks = np.zeros(_END + 1, dtype=bool)
    marks[points] = True
    return marks
