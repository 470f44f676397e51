"""Owns the manifest of a checkpoint: what makes it whole, what it was made by, and whether its files are as written.

A directory without a readable manifest is not a checkpoint. Plain files and JSON; imports no torch, must not know
what the files hold.
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

# 2: torch's files and nothing of Megatron's; 1, with `common.pt` or Megatron's `common_state` beside the tensors, is
# read as well.
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
# Each rank writes the sums of its own files beside them; the commit gathers them into the manifest.
_SUMS_PREFIX = ".sums-"
_BLOCK_BYTES = 1 << 20
_MOST_THREADS = 4
_FLUSH_SECONDS = 0.02
# The manifest's sum of itself, as a person would not notice a digit that changed.
_OWN_SUM = "sha256"


class CheckpointError(Exception):
    """A checkpoint cannot be used or written; the text names the file, why, and what to do."""


@dataclass(frozen=True)
class FileSum:
    """Size and SHA-256 of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    `config`: the run's config as YAML. `layout`: sizes of the job that wrote it. `counters`: iteration, consumed
    samples and tokens, loss scale and the like. `lists`: layers that have fallen back to BF16, their counts, and
    losses. `versions`: of the packages that wrote it. `written`: when, UTC. `files`: all others, by name.
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
        """Size of the files."""
        return sum(file.num_bytes for file in self.files.values())


def write_sums(directory: Path, rank: int, names: Iterable[str]) -> None:
    """Bring this rank's files to the disk, and note their sums for the commit."""
    paths = [directory / name for name in names]
    # The disk is waited for while what it is to write is summed.
    with ThreadPoolExecutor(_MOST_THREADS) as pool:
        synced = [pool.submit(sync, path) for path in paths]
        sums = dict(zip([path.name for path in paths], map(asdict, pool.map(file_sum, paths)), strict=True))
        for future in synced:
            future.result()
    write_whole(directory / f"{_SUMS_PREFIX}{rank:06d}.json", json.dumps(sums))


def gathered_sums(directory: Path) -> dict[str, FileSum]:
    """The sums of all ranks. CheckpointError if there is a file that nobody summed."""
    sums: dict[str, FileSum] = {}
    for path in sorted(directory.glob(f"{_SUMS_PREFIX}*.json")):
        sums.update({name: FileSum(**value) for name, value in json.loads(path.read_text(encoding="utf-8")).items()})
    unknown = {path.name for path in directory.iterdir() if not path.name.startswith(_SUMS_PREFIX)} - sums.keys()
    if unknown:
        raise CheckpointError(f"{directory}: no rank says that it wrote {', '.join(sorted(unknown))}")
    return sums


def remove_sums(directory: Path) -> None:
    """Remove what `write_sums` left; the manifest has it now."""
    for path in directory.glob(f"{_SUMS_PREFIX}*.json"):
        path.unlink()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest whole or not at all."""
    values = asdict(manifest)
    write_whole(directory / MANIFEST, json.dumps({**values, _OWN_SUM: _sum_of(values)}, indent=1) + "\n")


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory. CheckpointError where there is none, or it cannot be read."""
    path = directory / MANIFEST
    try:
        with open_file(path) as file:
            values: dict[str, Any] = json.load(file)
        if values.pop(_OWN_SUM) != _sum_of(values):
            raise ValueError("it is not what was written: its SHA-256 differs")
        files = {name: FileSum(**value) for name, value in values.pop("files").items()}
        manifest = Manifest(**values, files=files)
        if type(manifest.iteration) is not int or manifest.iteration < 0:
            raise ValueError(f"{manifest.iteration!r} is no iteration")
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: {directory} is not a whole checkpoint") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): the checkpoint is damaged") from error
    if manifest.format_version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format {manifest.format_version} is newer than this program's {FORMAT_VERSION}; "
            "use the version that wrote it"
        )
    return manifest


def _sum_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def damage(directory: Path, contents: bool = True, share: tuple[int, int] = (0, 1)) -> Iterator[str]:
    """What is wrong with a checkpoint, one line a file; nothing: it is whole.

    Sizes are always compared; `contents`: SHA-256 too, which reads every byte, of the files of one of several readers:
    `share` is its number and theirs.
    """
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        yield str(error)
        return
    if wrong := _what_is_wrong_with_config(manifest.config):
        yield f"{directory / MANIFEST}: {wrong}"
    reader, num_readers = share
    for index, (name, expected) in enumerate(manifest.files.items()):
        path = directory / name
        contents_here = contents and index % num_readers == reader
        if not is_file_name(name):
            yield f"{directory / MANIFEST} names {name!r}, which is outside of its directory"
        elif path.is_symlink():
            yield f"{path} is a link, which can lead anywhere: copy the checkpoint with the files themselves (cp -rL)"
        elif not path.is_file():
            yield f"{path} is missing"
        elif path.stat().st_size != expected.num_bytes:
            yield f"{path} has {path.stat().st_size:,} bytes; {expected.num_bytes:,} were written"
        elif contents_here and file_sum(path).sha256 != expected.sha256:
            yield f"{path} is not what was written: its SHA-256 differs"


def _what_is_wrong_with_config(text: str) -> str:
    """Empty where this is the YAML of a config's sections. Tags, which could name objects, are refused.

    Looked at when a checkpoint is chosen, not whenever a manifest is read: training waits for some of these readings.
    """
    try:
        sections = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        return f"its config is no plain YAML: {error}"
    has_sections = isinstance(sections, dict) and all(isinstance(section, dict) for section in sections.values())
    return "" if has_sections else "its config has no sections"


def is_file_name(name: str) -> bool:
    """Whether a name that a checkpoint gives is that of a file in its own directory."""
    return name not in ("", ".", "..") and Path(name).name == name


def file_sum(path: Path) -> FileSum:
    """Size and SHA-256 of a file."""
    digest, num_bytes = hashlib.sha256(), 0
    # One buffer: several files are summed at once, also where memory is short.
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(block):
            digest.update(block[:length])
            num_bytes += length
    return FileSum(num_bytes, digest.hexdigest())


def write_whole(path: Path, text: str) -> None:
    """Replace a file's text so that after a crash either the old or the new text is there."""
    temporary = path.with_name(f".{path.name}.tmp")
    # What is there is left of a killed job, or a link that somebody put there.
    temporary.unlink(missing_ok=True)
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def flushed_meanwhile(path: Path) -> Iterator[None]:
    """Bring a file to the disk while it is being written inside, so that little is left to wait for at its end.

    Raises OSError when the disk does not take it: the system says so once, so that a later `sync` would not know.
    """
    written = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(_flush_until, written, path)
        try:
            yield
        finally:
            written.set()
        flushing.result()


def _flush_until(written: threading.Event, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        while not written.wait(_FLUSH_SECONDS):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
