"""What a secret looks like in a text, and how it is masked. Imports no torch.

A config goes into the run directory, the report and dashboards, an error into logs: no key belongs in any of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

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
