"""Owns what a secret looks like in a text, its removal from what is written, and the refusal of one in a config.

A config goes into the run directory, the report and dashboards, an error into logs: none of them is a place for a key.
The environment, where secrets belong, is an argument. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from megatron_fp8.config.fields import config_fields
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import Config
from megatron_fp8.config.secret_forms import HIDDEN, hide

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


def secret_problems(config: Config, environ: Mapping[str, str], origins: Mapping[str, str]) -> list[Problem]:
    """The mistake of each key whose text holds a secret: a password in an address, a key, one of the environment."""
    secrets = secret_values(environ)
    return [
        Problem(
            key,
            hide(text, secrets),
            f"it holds a secret (shown as {HIDDEN}), and the config is written to the run directory and to dashboards",
            "an address without a password, and the secret in the environment or in the service's own file of logins",
            origins.get(key, ""),
        )
        for key, text in _texts(config)
        if hide(text, secrets) != text
    ]


def _texts(config: Config) -> Iterator[tuple[str, str]]:
    for key, spec in config_fields().items():
        value = getattr(getattr(config, spec.section), spec.name)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                yield key, text
