"""Checks every path that a config names: may this user read it, or write there?

Which keys name places is in the schema, as a mark on each (`config/limits.py`). What the files hold is not looked at,
and that nothing is there is the matter of those who read it, unless it is a link to nowhere. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_fp8.config.config_warnings import idle_keys
from megatron_fp8.config.fields import FieldSpec, config_fields
from megatron_fp8.config.limits import Place
from megatron_fp8.config.paths import is_missing, why_refused, why_unreadable, why_unwritable
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import Config

# Of a run: made by it, and written into by one that goes on.
_DIRECTORIES_OF_A_RUN = ("checkpoints", "profile")
# Beside the token files, where data.data_cache_path is null.
DEFAULT_CACHE = "cache"
_WANTED = {
    Place.FILE: ("a file",),
    Place.FILE_OR_FOLDER: ("a file", "a directory"),
    Place.CHECKPOINTS: ("a directory",),
}


def place_problems(config: Config, is_first: bool = True) -> list[Problem]:
    """What is refused of every place whose path is known before the run's directory is.

    `is_first`: whether this is rank 0, which alone writes for dashboards.
    """
    return [problem for spec in config_fields().values() for problem in _of_key(config, spec, is_first)]


def problems_in_run(config: Config, directory: Path) -> list[Problem]:
    """What is refused of the places that a run in `directory` writes to; it need not exist yet."""
    problems = [
        Problem(spec.key, value, reason, Place.IN_RUN.value)
        for spec, value in _in_run(config)
        if not Path(value).is_absolute() and (reason := why_unwritable(directory / value))
    ]
    for name in _DIRECTORIES_OF_A_RUN:
        if reason := why_unwritable(directory / name):
            use = "another run.name, or that directory as it was"
            problems.append(Problem("run.name", config.run.name, reason, use))
    return problems


def refusal_of_start(config: Config, error: OSError) -> Problem:
    """The mistake of the place that a run starts from, whose inside could not be read."""
    key = "run.root" if config.checkpoint.load is None else "checkpoint.load"
    value = config.run.root if config.checkpoint.load is None else config.checkpoint.load
    path = value if error.filename is None else os.fsdecode(error.filename)
    use = Place.RUNS if config.checkpoint.load is None else Place.CHECKPOINTS
    return Problem(key, value, why_refused(path, error), use.value)


def _in_run(config: Config) -> Iterator[tuple[FieldSpec, str]]:
    """The keys with effect that name places which may lie inside the run directory, with their values."""
    idle = {key for keys, _, _ in idle_keys(config) for key in keys}
    for spec in config_fields().values():
        value = _value(config, spec)
        if spec.place is Place.IN_RUN and spec.key not in idle and isinstance(value, str):
            yield spec, value


def _of_key(config: Config, spec: FieldSpec, is_first: bool) -> Iterator[Problem]:
    value = _value(config, spec)
    if spec.place is Place.IN_RUN:
        if is_first and isinstance(value, str) and Path(value).is_absolute() and (spec, value) in _in_run(config):
            yield from _problems(spec, value, why_unwritable(value))
    elif spec.place is Place.CACHE:
        yield from _problems(spec, value, _cache_reason(config, value))
    elif spec.place is not None:
        for path in value if isinstance(value, list) else [value]:
            if path is not None:
                yield from _problems(spec, path, _reason(config, spec.place, path))


def _problems(spec: FieldSpec, value: object, reason: str | None) -> Iterator[Problem]:
    if reason is not None:
        assert spec.place is not None
        yield Problem(spec.key, value, reason, spec.place.value)


def _reason(config: Config, place: Place, path: str) -> str | None:
    if place is Place.RUNS:
        # Whether it can be written to depends on whether a run goes on there.
        return _reason_of_way(Path(path) / config.run.name)
    if place is Place.TOKEN_FILES:
        # Also a blend's weight, which is no path: there is no such file.
        return next((reason for end in (".idx", ".bin") if (reason := _existing(f"{path}{end}", ("a file",)))), None)
    return _existing(path, _WANTED[place])


def _existing(path: str, wanted: tuple[str, ...]) -> str | None:
    return None if is_missing(path) else why_unreadable(path, wanted)


def _reason_of_way(path: Path) -> str | None:
    """Why nobody can say whether there is something at `path`."""
    try:
        os.lstat(path)
    except FileNotFoundError as error:
        return why_refused(path.parent, error) if path.parent.is_symlink() else None
    except (OSError, ValueError) as error:
        return why_refused(path, error)
    return None


def _cache_reason(config: Config, value: str | list[str] | None) -> str | None:
    """Indices that are there are read from a directory that cannot be written to: then a run may need no others."""
    prefix = next((path for path in config.data.data_path or config.data.train_data_path if not _is_weight(path)), None)
    if value is None and prefix is None:
        return None
    directory = Path(value) if isinstance(value, str) else Path(prefix or "").parent / DEFAULT_CACHE
    if value is None and why_unreadable(directory.parent, ("a directory",)):
        return None  # the token files' own mistake
    reason = why_unwritable(directory)
    if reason is None:
        return None
    if why_unreadable(directory, ("a directory",)) is None and any(directory.glob("[!.]*")):
        return None
    return f"cannot store sample indices there: {reason}"


def _is_weight(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _value(config: Config, spec: FieldSpec) -> str | list[str] | None:
    value: str | list[str] | None = getattr(getattr(config, spec.section), spec.name)
    return value
