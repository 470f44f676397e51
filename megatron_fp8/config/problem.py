"""A config error: what every check reports, how it reads, and the secrets that it must not show. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fp8.errors import BadInputError

# Names of variables, in words: a TOKENIZER is none.
_SECRET_NAME = re.compile(r"(^|_)((API|ACCESS|PRIVATE|SECRET)_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)")
# Where a secret lies, which is none.
_PLACE_NAME = re.compile(r"_(FILE|PATH|DIR)$")
# Shorter ones would be found in words and numbers that have nothing to do with them.
_FEWEST_CHARS = 8


def secret_values(environ: Mapping[str, str]) -> frozenset[str]:
    """The values of the variables that are secrets by their names."""
    return frozenset(
        value
        for name, value in environ.items()
        if _SECRET_NAME.search(name.upper())
        and not _PLACE_NAME.search(name.upper())
        and len(value) >= _FEWEST_CHARS
        and not value.startswith("/")
    )


HIDDEN = "***"
# `scheme://user:password@host`, `scheme://token@host`, also after a path's slashes were joined (`s3:/user:password@b`);
# not the @ of a path or of a query.
_IN_ADDRESS = re.compile(r"(?<=://)[^\s/@?#'\"]+(?=@)|(?<=:/)[^\s/@?#:'\"]+:[^\s/@?#'\"]+(?=@)")
# Keys that say by their form what they are: Hugging Face, GitHub, AWS, Slack and OpenAI-like ones, and headers.
_KEYS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|xox[a-z]-[A-Za-z0-9-]{10,}|sk-[A-Za-z0-9_-]{20,})|(?<=Bearer )[A-Za-z0-9._~+/-]{8,}=*"
)
# A key of a config, or of what somebody took for one, whose value is not to be repeated.
_SECRET_KEY = re.compile(
    r"(^|[._])(api_?key|password|passwd|secret|credentials?|(access|auth|hf|api|wandb)_token)($|_)"
)


def hide(text: str, secrets: Collection[str] = ()) -> str:
    """`text` with `***` in the place of passwords in addresses, of keys of known forms, and of the given `secrets`."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _KEYS.sub(HIDDEN, _IN_ADDRESS.sub(HIDDEN, text))


def is_secret_key(key: str) -> bool:
    """Whether a config key asks for a secret by its name; none of ours does."""
    return _SECRET_KEY.search(key.lower()) is not None


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
