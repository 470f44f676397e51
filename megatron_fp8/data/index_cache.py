"""Owns the directory of sample indices: built once on each disk, whole or absent, never stale, shared by runs.

Each build has a directory of its own: its name depends on the token files' sizes and times too, it is built under a
temporary name and renamed when it is whole. So neither an interruption, nor token files replaced under the same name,
nor two jobs that start together give wrong samples. Nodes need not share a disk: the lowest rank that sees a disk
builds on it. Must not know what is inside.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed

from megatron_fp8.config.problem import BadInputError
from megatron_fp8.data.token_file import bin_path, idx_path

INCOMPLETE = ".incomplete-"
LEFT_OVER_SECONDS = 7 * 24 * 3600


class IndexCacheError(BadInputError):
    """The directory of sample indices cannot be used; the text names it and what to do."""


@dataclass(frozen=True)
class Key:
    """What indices depend on: the name of their directory, and the sizes of the token files, the same on every disk."""

    name: str
    sizes: dict[str, int]


@dataclass(frozen=True)
class _Outcome:
    """What a rank that looks after a disk did there."""

    key: Key | None
    error: str | None


def cache_key(prefixes: Sequence[str], settings: Mapping[str, Any]) -> Key:
    """The key of a build from token files and everything else that its indices depend on. `settings` must be JSON."""
    states = {str(path): path.stat() for prefix in prefixes for path in (idx_path(prefix), bin_path(prefix))}
    files = {path: [state.st_size, state.st_mtime_ns] for path, state in states.items()}
    description = json.dumps({"files": files, "settings": settings}, sort_keys=True)
    name = hashlib.sha256(description.encode()).hexdigest()[:16]
    return Key(name, {path: state.st_size for path, state in states.items()})


def build_cached(
    root: Path, key: Callable[[], Key], build: Callable[[Path], None], reads_data: bool = True
) -> Path | None:
    """The directory in `root` that holds this key's indices; None on ranks that do not read data.

    With torch.distributed initialised every rank must call this. On each disk one rank calls `key` and, where the
    indices are not there, `build(directory)`; all the others wait. Raises IndexCacheError on every rank when one of
    them cannot build, or when two disks have different token files.
    """
    builders = _builders(root, reads_data)
    outcome = _look_after(root, key, build) if builders[_rank()] == _rank() else None
    outcomes = _all_gather(outcome)
    errors = [other.error for other in outcomes if other is not None and other.error is not None]
    if errors:
        raise IndexCacheError(errors[0])
    _require_same_files(outcomes)
    builder = builders[_rank()]
    if builder is None:
        return None
    looked_after = outcomes[builder]
    assert looked_after is not None
    assert looked_after.key is not None
    return root / looked_after.key.name


def _builders(root: Path, reads_data: bool) -> list[int | None]:
    """For each rank the lowest rank of those that see the same `root`; None for ranks that do not read data.

    Names of machines say nothing about disks, so files are asked: rank 0 leaves one, and who does not see it leaves
    another. Raises IndexCacheError on every rank when one of them cannot write.
    """
    if _world_size() == 1:
        return [0]
    names: list[str | None] = [None] * _world_size()
    left: list[Path] = []
    builder: int | None = None
    try:
        for first_round in (True, False):
            mine, error = None, None
            if reads_data and builder is None and (_rank() == 0 or not first_round):
                mine, error = _leave_probe(root, left)
            answers = _all_gather((mine, error))
            errors = [text for _, text in answers if text is not None]
            if errors:
                raise IndexCacheError(errors[0])
            names = [old or new for old, (new, _) in zip(names, answers, strict=True)]
            if reads_data and builder is None:
                builder = next((rank for rank, name in enumerate(names) if name and (root / name).exists()), None)
        # Nobody takes a file away that another rank still looks for.
        return _all_gather(builder)
    finally:
        for path in left:
            path.unlink(missing_ok=True)


def _leave_probe(root: Path, left: list[Path]) -> tuple[str | None, str | None]:
    """(name of a new file in `root`, None), or (None, why there is none)."""
    name = f".probe-{uuid.uuid4().hex}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    except OSError as error:
        return None, _not_writable(root, error)
    left.append(root / name)
    return name, None


def _look_after(root: Path, key: Callable[[], Key], build: Callable[[Path], None]) -> _Outcome:
    """Make sure that `root` has the indices. What goes wrong is told: the others would wait for a rank that is gone."""
    try:
        wanted = key()
        final = root / wanted.name
        if not final.is_dir():
            _sweep(root)
            with _temporary_directory(root, wanted.name) as directory:
                build(directory)
                _publish(directory, final)
    except OSError as error:
        return _Outcome(None, _not_writable(root, error))
    except (BadInputError, ValueError) as error:
        return _Outcome(None, str(error))
    return _Outcome(wanted, None)


@contextmanager
def _temporary_directory(root: Path, name: str) -> Iterator[Path]:
    directory = root / f".{name}{INCOMPLETE}{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _publish(directory: Path, final: Path) -> None:
    """Give the whole directory its name; where another job was faster its equal directory stays."""
    try:
        directory.rename(final)
    except OSError:
        if not final.is_dir():
            raise


def _sweep(root: Path) -> None:
    """Take away what builds that were killed left behind a week ago or longer."""
    for directory in root.glob(f".*{INCOMPLETE}*"):
        if time.time() - directory.stat().st_mtime > LEFT_OVER_SECONDS:
            shutil.rmtree(directory, ignore_errors=True)


def _require_same_files(outcomes: Sequence[_Outcome | None]) -> None:
    """Copies of the token files on several disks must be the same, or ranks would read different samples."""
    keys = {rank: other.key for rank, other in enumerate(outcomes) if other is not None and other.key is not None}
    first = keys[min(keys)]
    for rank, key in keys.items():
        for path, size in key.sizes.items():
            if size != first.sizes[path]:
                raise IndexCacheError(
                    f"{path} has {first.sizes[path]} bytes on the disk of rank {min(keys)} and {size} bytes on that of "
                    f"rank {rank}: copy the same token files to every node"
                )


def _not_writable(root: Path, error: OSError) -> str:
    return (
        f"sample indices cannot be kept in {root} on {socket.gethostname()}: {error}. Set data.data_cache_path to a "
        f"directory that can be written"
    )


def _all_gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * _world_size()
    if _world_size() == 1:
        return [value]
    torch.distributed.all_gather_object(values, value)
    return values


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
