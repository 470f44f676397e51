"""Owns the form of a config mistake: what every check reports and how a person reads it. Imports no torch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One mistake: the dotted key, its value, why it is wrong and what to use instead."""

    key: str
    value: Any
    reason: str
    use_instead: str


class ConfigError(Exception):
    """All the mistakes of a config at once; its text is what a person is shown. Programs exit with code 2."""
