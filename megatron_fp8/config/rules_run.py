"""Rules for logging, faults and profiling, and the wandb login. Imports no torch, no wandb."""

from __future__ import annotations

import configparser
import netrc
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from megatron_fp8.config.facts import Alternative, Facts, Finding
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import Config

PROJECT = "logging.wandb_project"
MODE = "logging.wandb_mode"
TAGS = "logging.wandb_tags"
# As wandb's client has them (`wandb.Settings`).
_MAX_PROJECT_CHARS = 128
_NOT_IN_A_PROJECT = "/\\#?%:"
_MAX_TAG_CHARS = 64
_HOST = "https://api.wandb.ai"


def check_logging(facts: Facts) -> Iterator[Finding]:
    """Every name that wandb would refuse when the run starts."""
    logging = facts.config.logging
    project = logging.wandb_project
    if project is not None:
        wrong = sorted(set(_NOT_IN_A_PROJECT) & set(project))
        if not project.strip():
            yield Finding("project", PROJECT, "must not be empty", otherwise="a name, or null for a run without wandb")
        elif wrong:
            reason = f"wandb does not allow {' '.join(wrong)} in project names"
            name = "".join("-" if char in _NOT_IN_A_PROJECT else char for char in project)
            yield Finding("project", PROJECT, reason, otherwise=f"{PROJECT}={name}; the team goes to wandb_entity")
        elif len(project) > _MAX_PROJECT_CHARS:
            reason = f"{len(project)} characters long; wandb allows at most {_MAX_PROJECT_CHARS}"
            yield Finding("project", PROJECT, reason, otherwise="a shorter name")
    for tag in logging.wandb_tags:
        if not 1 <= len(tag) <= _MAX_TAG_CHARS:
            reason = f"the tag {tag!r} is {len(tag)} characters long; wandb allows 1 to {_MAX_TAG_CHARS}"
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
    return Problem(MODE, logging.wandb_mode, f"{PROJECT} is set, but {missing}", use, origin)


def missing_login(environ: Mapping[str, str]) -> str | None:
    """Why wandb's client would find no login, or None: it looks in `environ` and in files of the home directory."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return None
    home = Path(environ.get("HOME", "~")).expanduser()
    host = urlsplit(_server(environ, home)).netloc
    path = Path(environ.get("NETRC", home / ".netrc")).expanduser()
    if _has_password(path, host):
        return None
    return f"there is no login for {host}: neither WANDB_API_KEY nor an entry in {path} exists"


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


SAVE = "checkpoint.save"
SAVE_INTERVAL = "checkpoint.save_interval"
KEEP_LAST = "checkpoint.keep_last"
LARGE = "faults.spike_large_threshold"


def check_faults(facts: Facts) -> Iterator[Finding]:
    """Every mistake of the policies for steps that go wrong."""
    faults = facts.config.faults
    if faults.spike != "off" and faults.spike_large_threshold < faults.spike_threshold:
        reason = (
            f"must not be below faults.spike_threshold={faults.spike_threshold:g}, which needs several steps in a row"
        )
        yield Finding("large spike", LARGE, reason, (Alternative(LARGE, [5 * faults.spike_threshold]),))
    for policy in ("nonfinite", "spike"):
        if getattr(faults, policy) == "rewind":
            yield from _rewind(facts, policy)


def _rewind(facts: Facts, policy: str) -> Iterator[Finding]:
    """There must be a checkpoint to go back to, from before the bad steps."""
    faults, checkpoint, key = facts.config.faults, facts.config.checkpoint, f"faults.{policy}"
    other = Alternative(key, ["stop" if policy == "nonfinite" else "warn"])
    train_iters = facts.config.training.train_iters
    if not checkpoint.save:
        reason = f"{SAVE} is false, so there is no checkpoint to roll back to"
        yield Finding(f"{policy}: no checkpoints", key, reason, (Alternative(SAVE, [True]), other))
    elif checkpoint.save_interval == 0 or 0 < train_iters <= checkpoint.save_interval:
        reason = f"with {SAVE_INTERVAL}={checkpoint.save_interval} no checkpoint is written before the end of the run"
        smaller = Alternative(SAVE_INTERVAL, [1000, 100, 10, 1], most=1)
        yield Finding(f"{policy}: no checkpoints", key, reason, (smaller, other))
    elif checkpoint.keep_last is not None:
        # Those that are kept may all be of the steps until a spike is noticed, but for the oldest.
        steps = faults.spike_num_steps if policy == "spike" else 1
        least = 1 + -(-steps // checkpoint.save_interval)
        if checkpoint.keep_last < least:
            reason = (
                f"{key}=rewind needs a checkpoint from before the bad steps, of which there can be {steps}; by then "
                f"the {checkpoint.keep_last} checkpoints kept, {checkpoint.save_interval} steps apart, are all newer"
            )
            enough = Alternative(KEEP_LAST, [least, None])
            yield Finding(f"{policy}: kept checkpoints", KEEP_LAST, reason, (enough, other))


HANG, COLLECTIVES = "faults.hang_timeout_minutes", "parallel.distributed_timeout_minutes"


def check_hang(facts: Facts) -> Iterator[Finding]:
    """A time after which collectives have ended the job already, without naming the rank that held it up."""
    minutes, collectives = facts.get(HANG), facts.get(COLLECTIVES)
    if minutes and minutes >= collectives:
        reason = f"{COLLECTIVES}={collectives:g} ends the job earlier, without naming the rank that hangs"
        shorter, longer = Alternative(HANG, [None]), Alternative(COLLECTIVES, [2 * minutes])
        yield Finding("time of a hang", HANG, reason, (shorter, longer))


START, STOP, RANKS = "profile.start", "profile.stop", "profile.ranks"
_STEPS = 2


def check_profile(facts: Facts) -> Iterator[Finding]:
    """Every mistake of the section `profile`."""
    profile, train_iters = facts.config.profile, facts.config.training.train_iters
    if profile.start is None and profile.stop is None:
        return
    if profile.stop is None and profile.start is not None:
        stop = Alternative(STOP, [profile.start + _STEPS, profile.start + 1], most=1)
        yield Finding("trace's end", STOP, f"missing: {START}={profile.start} starts a trace that never stops", (stop,))
    elif profile.start is None and profile.stop is not None:
        start = Alternative(START, [max(0, profile.stop - _STEPS)])
        yield Finding(
            "trace's start", START, f"missing: {STOP}={profile.stop} stops a trace that never starts", (start,)
        )
    elif profile.start is not None and profile.stop is not None and profile.start >= profile.stop:
        reason = f"must be greater than {START}={profile.start}"
        later = Alternative(STOP, [profile.start + _STEPS, profile.start + 1], most=1)
        earlier = Alternative(START, [max(0, profile.stop - _STEPS)])
        yield Finding("trace's steps", STOP, reason, (later, earlier))
    # 0: not known yet.
    if train_iters and profile.stop is not None and profile.stop > train_iters:
        reason = f"the run has {train_iters} steps"
        yield Finding("trace's stop", STOP, reason, (Alternative(STOP, [train_iters]),))
    yield from _ranks(facts)


def _ranks(facts: Facts) -> Iterator[Finding]:
    ranks = facts.config.profile.ranks
    wrong = sorted({rank for rank in ranks if rank < 0 or (facts.world_size is not None and rank >= facts.world_size)})
    right = list(dict.fromkeys(rank for rank in ranks if rank not in wrong)) or [0]
    alternative = Alternative(RANKS, [right])
    if not ranks:
        yield Finding("no ranks", RANKS, f"{START} is set, but the list of ranks is empty", (alternative,))
    elif wrong:
        job = (
            "ranks are counted from 0" if facts.world_size is None else f"the job has ranks 0 to {facts.world_size - 1}"
        )
        yield Finding("ranks", RANKS, f"no such rank: {', '.join(map(str, wrong))}; {job}", (alternative,))
    elif len(set(ranks)) < len(ranks):
        yield Finding("ranks twice", RANKS, "the list contains duplicate ranks", (alternative,))
