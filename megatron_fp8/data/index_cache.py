"""Caches sample indices in a directory: built once per disk, complete or absent, never stale, shared by runs.

Each build gets its own directory, whose name also depends on the token files' sizes and times; it is built under a
temporary name and renamed when complete. So neither an interruption, nor token files replaced under the same name, nor
two jobs that start together give wrong samples. Nodes need not share a disk: the lowest rank that sees a disk builds on
it.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed

from megatron_fp8.data.token_file import bin_path, idx_path
from megatron_fp8.errors import BadInputError
from megatron_fp8.parallel.object_collectives import all_gather

INCOMPLETE = ".incomplete-"
STALE_SECONDS = 7 * 24 * 3600


class IndexCacheError(BadInputError):
    """The index cache cannot be used; the message names the directory and what to do."""


@dataclass(frozen=True)
class Key:
    """What indices depend on: a directory name, and the token files' sizes, which must agree on every disk."""

    name: str
    sizes: dict[str, int]


@dataclass(frozen=True)
class _Report:
    """What a rank reports about its disk. `sizes`: a hash of the token files' sizes."""

    name: str = ""
    sizes: str = ""
    is_ready: bool = False
    error: str | None = None


def cache_key(prefixes: Sequence[str], settings: Mapping[str, Any]) -> Key:
    """The key of indices of these token files; `settings`, JSON, is everything else that they depend on."""
    states = {str(path): path.stat() for prefix in prefixes for path in (idx_path(prefix), bin_path(prefix))}
    files = {path: [state.st_size, state.st_mtime_ns] for path, state in states.items()}
    description = json.dumps({"files": files, "settings": settings}, sort_keys=True)
    name = hashlib.sha256(description.encode()).hexdigest()[:16]
    return Key(name, {path: state.st_size for path, state in states.items()})


def build_cached(
    root: Path, key: Callable[[], Key], build: Callable[[Path], None], reads_data: bool = True
) -> Path | None:
    """The directory in `root` with this key's indices; None on ranks that do not read data. Collective over all ranks.

    If indices are missing, one rank per disk calls `build(directory)` while the others wait; otherwise nothing is
    written. Raises IndexCacheError on every rank when one cannot build, or when disks have different token files.
    """
    wanted = mine = None
    if reads_data:
        try:
            wanted = key()
            sizes = hashlib.sha256(json.dumps(wanted.sizes, sort_keys=True).encode()).hexdigest()
            mine = _Report(wanted.name, sizes, (root / wanted.name).is_dir())
        except (OSError, BadInputError) as error:
            # Reported, not raised: the others would wait forever.
            mine = _Report(error=str(error))
    reports = _exchange(mine)
    if len({report.sizes for report in reports if report is not None}) > 1:
        raise IndexCacheError(_difference(all_gather(wanted.sizes if wanted is not None else None)))
    if all(report.is_ready for report in reports if report is not None):
        return root / mine.name if mine is not None else None
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    builder = _builders(root, reads_data, rank, len(reports))[rank]
    built = _exchange(_build_missing(root, mine.name, build) if mine is not None and builder == rank else None)
    report = built[builder] if builder is not None else None
    return root / report.name if report is not None else None


def _exchange(report: _Report | None) -> list[_Report | None]:
    """Every rank's report. Raises IndexCacheError on all of them when one has an error."""
    reports: list[_Report | None] = all_gather(report)
    for other in reports:
        if other is not None and other.error is not None:
            raise IndexCacheError(other.error)
    return reports


def _builders(root: Path, reads_data: bool, rank: int, num_ranks: int) -> list[int | None]:
    """For each rank the lowest rank that sees the same `root`; None for ranks that do not read data.

    Host names say nothing about disks, so probe files are used: rank 0 creates one, and each rank that does not see it
    creates another. Raises IndexCacheError on every rank when one cannot write.
    """
    if num_ranks == 1:
        return [0]
    names: list[str | None] = [None] * num_ranks
    left: list[Path] = []
    builder: int | None = None
    try:
        for first_round in (True, False):
            mine, error = None, None
            if reads_data and builder is None and (rank == 0 or not first_round):
                mine, error = _create_probe(root, left)
            answers = all_gather((mine, error))
            errors = [text for _, text in answers if text is not None]
            if errors:
                raise IndexCacheError(errors[0])
            names = [old or new for old, (new, _) in zip(names, answers, strict=True)]
            if reads_data and builder is None:
                builder = next((other for other, name in enumerate(names) if name and (root / name).exists()), None)
        # Gathered before probes are removed: another rank may still be looking for one.
        return all_gather(builder)
    finally:
        for path in left:
            path.unlink(missing_ok=True)


def _create_probe(root: Path, left: list[Path]) -> tuple[str | None, str | None]:
    """(name of a new file in `root`, None), or (None, the reason why it could not be created)."""
    name = f".probe-{uuid.uuid4().hex}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    except OSError as error:
        return None, _not_writable(root, error)
    left.append(root / name)
    return name, None


def _build_missing(root: Path, name: str, build: Callable[[Path], None]) -> _Report:
    """Build the indices in `root` if they are missing. Errors are reported, not raised."""
    final = root / name
    try:
        if not final.is_dir():
            _sweep(root)
            with _temporary_directory(root, name) as directory:
                build(directory)
                try:
                    directory.rename(final)
                except OSError:
                    # Another job may have been faster; then its equal directory stays.
                    if not final.is_dir():
                        raise
    except OSError as error:
        return _Report(error=_not_writable(root, error))
    except (BadInputError, ValueError) as error:
        return _Report(error=str(error))
    return _Report(name)


@contextmanager
def _temporary_directory(root: Path, name: str) -> Iterator[Path]:
    directory = root / f".{name}{INCOMPLETE}{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Remove what killed builds left behind at least a week ago."""
    for directory in root.glob(f".*{INCOMPLETE}*"):
        # Another job may finish or sweep at the same time.
        with suppress(FileNotFoundError):
            if time.time() - directory.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(directory, ignore_errors=True)


def _difference(sizes: Sequence[dict[str, int] | None]) -> str:
    """How copies of the token files on several disks differ."""
    known = {rank: files for rank, files in enumerate(sizes) if files is not None}
    first = min(known)
    for rank, files in known.items():
        for path, size in files.items():
            expected = known[first].get(path)
            if size != expected:
                return (
                    f"{path} has {expected} bytes on the disk of rank {first} and {size} bytes on that of rank {rank}: "
                    "copy the same token files to every node"
                )
    return "ranks name different token files"


def _not_writable(root: Path, error: OSError) -> str:
    return (
        f"cannot write sample indices to {root} on {socket.gethostname()}: {error}; set data.data_cache_path to a "
        "writable directory"
    )
