"""Owns where a text may be cut so that the tokens of its parts, one after another, are those of the whole.

Which places these are depends on the tokenizer; `vocab/` decides it. Here is only how a long text is cut at them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TAIL_CHARS = 2**12


@dataclass(frozen=True)
class Cuts:
    """The places between two characters where a tokenizer's texts may be cut."""

    places: re.Pattern[str]
    """Matches nothing, at these places, which need no more than a few characters around them."""
    begins_with_space: bool = False
    """Whether the tokenizer itself puts a space before a text: then each place is before a space, and a part that is
    not the first is encoded without it (`rest`)."""

    def last(self, text: str, begin: int, end: int) -> int | None:
        """The last place after `begin` and before `end`, None without one."""
        start = max(begin, end - _TAIL_CHARS)
        while True:
            found = [match.start() for match in self.places.finditer(text, start, end)]
            if found and found[-1] > begin:
                return found[-1]
            if start == begin:
                return None
            start = begin

    def parts(self, text: str, most_chars: int) -> Iterator[str]:
        """The text in parts of at most `most_chars`, more only where there is no place; as they are to be encoded."""
        start = 0
        while len(text) - start > most_chars:
            place = self.last(text, start, start + most_chars)
            if place is None:
                found = self.places.search(text, start + most_chars)
                if found is None or found.start() == len(text):
                    break
                place = found.start()
            yield self.rest(text[start:place]) if start else text[start:place]
            start = place
        yield self.rest(text[start:]) if start else text

    def rest(self, part: str) -> str:
        """What is to be encoded of a part that is not a text's first."""
        return part[1:] if self.begins_with_space else part


ANYWHERE = Cuts(re.compile(r"(?s)(?<=.)(?=.)"))
# Before a word: a letter, with a space before it, after what is neither white space, which Python knows all of and
# more, nor the sign that stands for a space in tokens.
_WORD = r"(?<=[^\s\N{LOWER ONE EIGHTH BLOCK}])(?= [A-Za-z])"
BEFORE_WORDS = Cuts(re.compile(_WORD))
# There, and after a line that ends in no white space before one that begins with none; not before a slash, which
# goes with the end of a line in some splittings into words.
WORDS_AND_LINES = Cuts(re.compile(rf"{_WORD}|(?<=\S\n)(?=[^\s/])"))
# Before a word, whose space the tokenizer puts there.
AT_SPACES = Cuts(re.compile(_WORD), begins_with_space=True)
