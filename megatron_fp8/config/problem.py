"""Owns the form of a config mistake: what every check reports and how a person reads it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fp8.config.secret_texts import HIDDEN, hide, is_secret_key
from megatron_fp8.errors import BadInputError

MAX_VALUE_CHARS = 120


@dataclass(frozen=True)
class Problem:
    """One mistake: the dotted key, its value, why it is wrong and what to use instead.

    `origin` says where the value was written: `file:line`, "command line", "default", or "" when it has none.
    """

    key: str
    value: Any
    reason: str
    use_instead: str
    origin: str = ""

    def __str__(self) -> str:
        """Three lines for a person: key, value and origin; why; what to use. Secrets are not repeated."""
        origin = f"  ({self.origin})" if self.origin else ""
        value = HIDDEN if is_secret_key(self.key) else show_value(self.value)
        return hide(f"{self.key} = {value}{origin}\n    why: {self.reason}\n    use: {self.use_instead}")


class ConfigError(BadInputError):
    """All the mistakes of a config at once; its text is what a person is shown. Programs exit with code 2.

    `problems` holds them one by one; it is empty when the error was raised with a text alone.
    """

    problems: tuple[Problem, ...] = ()

    @classmethod
    def from_problems(cls, problems: Sequence[Problem]) -> ConfigError:
        """The error that reports `problems`, in their order."""
        count = f"{len(problems)} mistakes" if len(problems) > 1 else "1 mistake"
        error = cls("\n".join([f"{count} in the config:", *(str(problem) for problem in problems)]))
        error.problems = tuple(problems)
        return error


def first_few(texts: Sequence[str], separator: str = ", ", most: int = 5) -> str:
    """The first `most` texts, and how many more there are."""
    return separator.join([*texts[:most], *([f"and {len(texts) - most} more"] if len(texts) > most else [])])


def show_value(value: Any) -> str:
    """`value` as it would be written in a config, cut where it is too long to read."""
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, (list, tuple)):
        text = f"[{', '.join(show_value(item) for item in value)}]"
    else:
        text = " ".join(str(value).split())
    if len(text) > MAX_VALUE_CHARS:
        return f"{text[:MAX_VALUE_CHARS]}..."
    return text
