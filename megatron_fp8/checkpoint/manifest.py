"""Reads and writes a checkpoint's manifest (files, checksums, config, counters), and verifies the files against it.

A directory without a readable manifest is not a checkpoint. Plain files and JSON; imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_fp8.config.paths import open_file

# 2: only torch's files. Format 1, with `common.pt` or Megatron's `common_state` beside the tensors, is read as well.
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
# Each rank writes the checksums of its files beside them; the commit gathers them into the manifest.
_SUMS_PREFIX = ".sums-"
_BLOCK_BYTES = 1 << 20
_MAX_THREADS = 4
_SYNC_SECONDS = 0.02
# The key of the manifest's own checksum, over all other keys.
_OWN_SUM = "sha256"


class CheckpointError(Exception):
    """A checkpoint cannot be used or written; the message names the file, the reason, and what to do."""


@dataclass(frozen=True)
class FileSum:
    """Size and SHA-256 of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's manifest.

    `config`: the run's config as YAML. `layout`: sizes of the job that wrote it. `counters`: consumed samples and
    tokens, loss scale and the like. `lists`: layers that have fallen back to BF16, their counts, recent losses.
    `versions`: of the packages that wrote it. `written`: when, in UTC. `files`: all other files by name.
    """

    iteration: int
    config: str
    layout: Mapping[str, int]
    counters: Mapping[str, float]
    versions: Mapping[str, str]
    lists: Mapping[str, list[Any]] = field(default_factory=dict)
    written: str = ""
    files: Mapping[str, FileSum] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def num_bytes(self) -> int:
        """Total size of the files."""
        return sum(file.num_bytes for file in self.files.values())


def write_sums(directory: Path, rank: int, names: Iterable[str]) -> None:
    """Sync this rank's files to disk, and save their checksums for the commit."""
    paths = [directory / name for name in names]
    # Syncing and summing overlap.
    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        synced = [pool.submit(sync, path) for path in paths]
        sums = dict(zip([path.name for path in paths], map(asdict, pool.map(file_sum, paths)), strict=True))
        for future in synced:
            future.result()
    write_atomically(directory / f"{_SUMS_PREFIX}{rank:06d}.json", json.dumps(sums))


def gathered_sums(directory: Path) -> dict[str, FileSum]:
    """The checksums of all ranks. CheckpointError if a file has none."""
    sums: dict[str, FileSum] = {}
    for path in sorted(directory.glob(f"{_SUMS_PREFIX}*.json")):
        sums.update({name: FileSum(**value) for name, value in json.loads(path.read_text(encoding="utf-8")).items()})
    unknown = {path.name for path in directory.iterdir() if not path.name.startswith(_SUMS_PREFIX)} - sums.keys()
    if unknown:
        raise CheckpointError(f"{directory}: no rank has a checksum of {', '.join(sorted(unknown))}")
    return sums


def remove_sums(directory: Path) -> None:
    """Remove the files of `write_sums` after the manifest has been written."""
    for path in directory.glob(f"{_SUMS_PREFIX}*.json"):
        path.unlink()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest atomically."""
    values = asdict(manifest)
    write_atomically(directory / MANIFEST, json.dumps({**values, _OWN_SUM: _sum_of(values)}, indent=1) + "\n")


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint. CheckpointError if it is missing or cannot be read."""
    path = directory / MANIFEST
    try:
        with open_file(path) as file:
            values: dict[str, Any] = json.load(file)
        if values.pop(_OWN_SUM) != _sum_of(values):
            raise ValueError("its SHA-256 differs from what was written")
        files = {name: FileSum(**value) for name, value in values.pop("files").items()}
        manifest = Manifest(**values, files=files)
        if type(manifest.iteration) is not int or manifest.iteration < 0:
            raise ValueError(f"{manifest.iteration!r} is not an iteration")
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: {directory} is not a checkpoint, or an incomplete one") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): the checkpoint is corrupt") from error
    if manifest.format_version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format {manifest.format_version} is newer than this program's {FORMAT_VERSION}; "
            "use the version that wrote the checkpoint"
        )
    return manifest


def _sum_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def find_corruption(directory: Path, contents: bool = True, share: tuple[int, int] = (0, 1)) -> Iterator[str]:
    """Yield one message per missing or corrupt file of a checkpoint; nothing if it is intact.

    Sizes are always compared. `contents`: SHA-256 too, which reads every byte; with several readers, each reads the
    files of its `share` (its number, number of readers).
    """
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        yield str(error)
        return
    if wrong := _config_problem(manifest.config):
        yield f"{directory / MANIFEST}: {wrong}"
    reader, num_readers = share
    for index, (name, expected) in enumerate(manifest.files.items()):
        path = directory / name
        contents_here = contents and index % num_readers == reader
        if not is_file_name(name):
            yield f"{directory / MANIFEST} names {name!r}, which is outside the checkpoint"
        elif path.is_symlink():
            yield f"{path} is a symbolic link, which is not followed: copy the checkpoint with its files (cp -rL)"
        elif not path.is_file():
            yield f"{path} is missing"
        elif path.stat().st_size != expected.num_bytes:
            yield f"{path} has {path.stat().st_size:,} bytes, but {expected.num_bytes:,} were written"
        elif contents_here and file_sum(path).sha256 != expected.sha256:
            yield f"{path} is corrupt: its SHA-256 differs from what was written"


def _config_problem(text: str) -> str:
    """Why this is not the YAML of a config's sections; empty if it is. Tags, which could name objects, are refused.

    Checked when a checkpoint is chosen, not at every reading of a manifest, for some of which training waits.
    """
    try:
        sections = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        return f"its config is not plain YAML: {error}"
    has_sections = isinstance(sections, dict) and all(isinstance(section, dict) for section in sections.values())
    return "" if has_sections else "its config has no sections"


def is_file_name(name: str) -> bool:
    """Whether a name in a checkpoint stays inside the checkpoint's directory."""
    return name not in ("", ".", "..") and Path(name).name == name


def file_sum(path: Path) -> FileSum:
    """Size and SHA-256 of a file."""
    digest, num_bytes = hashlib.sha256(), 0
    # One buffer per file: several files are summed at once.
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(block):
            digest.update(block[:length])
            num_bytes += length
    return FileSum(num_bytes, digest.hexdigest())


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's text so that a crash leaves either the old or the new text."""
    temporary = path.with_name(f".{path.name}.tmp")
    # Left behind by a killed job, or a link that somebody put there.
    temporary.unlink(missing_ok=True)
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def syncing(path: Path) -> Iterator[None]:
    """Sync a file in the background while it is written inside, so that little is left at its end.

    Raises OSError if the disk fails: the system reports that once, and a later `sync` would not see it.
    """
    written = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        background = pool.submit(_sync_until, written, path)
        try:
            yield
        finally:
            written.set()
        background.result()


def _sync_until(written: threading.Event, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        while not written.wait(_SYNC_SECONDS):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
