"""Owns what must hold for a run that is sent to wandb: names that it takes, and a login. Imports no torch, no wandb."""

from __future__ import annotations

import configparser
import netrc
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from megatron_fp8.config.facts import Facts, Finding
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import Config

PROJECT = "logging.wandb_project"
MODE = "logging.wandb_mode"
TAGS = "logging.wandb_tags"
# As wandb's client has them (`wandb.Settings`).
_MOST_PROJECT_CHARS = 128
_NOT_IN_A_PROJECT = "/\\#?%:"
_MOST_TAG_CHARS = 64
_HOST = "https://api.wandb.ai"


def check_logging(facts: Facts) -> Iterator[Finding]:
    """Every name that wandb would refuse when the run starts."""
    logging = facts.config.logging
    project = logging.wandb_project
    if project is not None:
        wrong = sorted(set(_NOT_IN_A_PROJECT) & set(project))
        if not project.strip():
            yield Finding("project", PROJECT, "it is empty", otherwise="a name, or null for a run without wandb")
        elif wrong:
            reason = f"wandb allows no {' '.join(wrong)} in it"
            name = "".join("-" if char in _NOT_IN_A_PROJECT else char for char in project)
            yield Finding("project", PROJECT, reason, otherwise=f"{PROJECT}={name}; the team goes to wandb_entity")
        elif len(project) > _MOST_PROJECT_CHARS:
            reason = f"it has {len(project)} characters, and wandb allows {_MOST_PROJECT_CHARS}"
            yield Finding("project", PROJECT, reason, otherwise="a shorter name")
    for tag in logging.wandb_tags:
        if not 1 <= len(tag) <= _MOST_TAG_CHARS:
            reason = f"the tag {tag!r} has {len(tag)} characters, and wandb takes 1 to {_MOST_TAG_CHARS}"
            yield Finding(f"tag {tag}", TAGS, reason, otherwise="another tag")


def login_problem(config: Config, environ: Mapping[str, str], origin: str = "") -> Problem | None:
    """The mistake of a run that is to go to wandb's server from a machine that is not logged in there.

    Only rank 0 needs a login.
    """
    logging = config.logging
    if logging.wandb_project is None or logging.wandb_mode != "online" or environ.get("RANK", "0") != "0":
        return None
    missing = missing_login(environ)
    if missing is None:
        return None
    use = f"`wandb login`, {MODE}=offline and `wandb sync` later, or {PROJECT}=null"
    return Problem(MODE, logging.wandb_mode, f"{PROJECT} is set, and {missing}", use, origin)


def missing_login(environ: Mapping[str, str]) -> str | None:
    """Why wandb's client would find no login, or None: it looks in `environ` and in files of the home directory."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return None
    home = Path(environ.get("HOME", "~")).expanduser()
    host = urlsplit(_server(environ, home)).netloc
    path = Path(environ.get("NETRC", home / ".netrc")).expanduser()
    if _has_password(path, host):
        return None
    return f"there is no login for {host}: neither WANDB_API_KEY nor an entry in {path}"


def _server(environ: Mapping[str, str], home: Path) -> str:
    if environ.get("WANDB_BASE_URL"):
        return environ["WANDB_BASE_URL"]
    directory = Path(environ.get("WANDB_CONFIG_DIR", home / ".config" / "wandb"))
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(directory / "settings", encoding="utf-8")
    except configparser.Error:  # wandb passes over it too
        return _HOST
    return settings.get("default", "base_url", fallback=_HOST)


def _has_password(path: Path, host: str) -> bool:
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
