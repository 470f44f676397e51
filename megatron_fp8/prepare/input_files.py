"""Finds the input files of preprocessing, and reads their content, plain or compressed (gzip, Zstandard, bzip2, xz)."""

from __future__ import annotations

import bz2
import glob
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow
import pyarrow.parquet
import zstandard

from megatron_fp8.errors import BadInputError

JSONL, PARQUET, TEXT, AUTO = "jsonl", "parquet", "text", "auto"
FORMATS = (AUTO, JSONL, PARQUET, TEXT)
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_FORMAT_OF_SUFFIX = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), JSONL),
    ".parquet": PARQUET,
    **dict.fromkeys((".txt", ".text", ".md"), TEXT),
}
_CHUNK_BYTES = 2**16
# Zstandard's --long=31, with which large collections are packed. Only a file packed that way takes this much memory.
_MAX_WINDOW_BYTES = 2**31


class InputError(BadInputError):
    """An input cannot be found or read; the message names it."""


@dataclass(frozen=True)
class InputFile:
    """A file of texts as it was found."""

    path: Path
    format: str
    size_bytes: int
    modified_ns: int


def find_inputs(names: Sequence[str], input_format: str, keys: Sequence[str]) -> list[InputFile]:
    """The files that paths, folders and patterns name, in this order, sorted within each folder and pattern.

    A folder stands for all files below it except hidden ones; links are followed. Format `auto`: by suffix; files
    without a known one are left out of folders and patterns (`skipped_inputs`) and refused if named. Raises InputError.
    """
    found: dict[Path, InputFile] = {}
    unknown: list[Path] = []
    for name in names:
        for path in _paths(name):
            kind = format_of(path) if input_format == AUTO else input_format
            if kind is None:
                unknown.append(path)
                continue
            place = path.resolve()
            if place in found:
                also = f", also as {found[place].path}" if found[place].path != path else ""
                raise InputError(f"{path} is named twice{also}; its texts would be encoded twice")
            status = path.stat()
            found[place] = InputFile(path, kind, status.st_size, status.st_mtime_ns)
    named = [path for path in unknown if str(path) in {str(Path(name)) for name in names}]
    if named or not found:
        raise InputError(
            f"{', '.join(map(str, named or unknown))}: no known suffix ({', '.join(_FORMAT_OF_SUFFIX)}, each also with "
            f"{', '.join(_COMPRESSED)}); say what it holds with --input-format"
        )
    for file in found.values():
        _check(file, keys)
    return list(found.values())


def skipped_inputs(names: Sequence[str], input_format: str) -> list[Path]:
    """The files in folders and patterns that `find_inputs` leaves out. Raises InputError."""
    if input_format != AUTO:
        return []
    return list(dict.fromkeys(path for name in names for path in _paths(name) if format_of(path) is None))


def format_of(path: Path) -> str | None:
    """The format that a file's suffix says; None if it says nothing."""
    suffix = path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix
    return _FORMAT_OF_SUFFIX.get(suffix.lower())


def _paths(name: str) -> Iterator[Path]:
    """Each file that `name` stands for."""
    path = Path(name)
    if path.is_dir():
        shown = (file for file in _below(path) if not any(part[0] == "." for part in file.relative_to(path).parts))
        files = sorted(file for file in shown if file.is_file())
        if not files:
            raise InputError(f"{name} is an empty folder")
        yield from files
    elif path.is_file():
        yield path
    elif glob.has_magic(name):
        matching = sorted(Path(match) for match in glob.glob(name, recursive=True))  # noqa: PTH207 (a pattern may be absolute)
        if not any(file.is_file() for file in matching):
            raise InputError(f"no file matches {name}")
        yield from (file for file in matching if file.is_file())
    elif path.exists():
        raise InputError(f"{name} is neither a file nor a folder; killed work could not resume from it")
    else:
        raise InputError(f"{name} does not exist; name files, folders or patterns such as 'texts/*.jsonl.gz'")


def _below(folder: Path) -> Iterator[Path]:
    """All names in a folder and its subfolders, each folder once however many links lead to it."""
    seen: set[Path] = set()
    for directory, below, names in os.walk(folder, followlinks=True):
        place = Path(directory).resolve()
        if place in seen:
            below.clear()
            continue
        seen.add(place)
        below.sort()
        yield from (Path(directory) / name for name in names)


def _check(file: InputFile, keys: Sequence[str]) -> None:
    if file.format == TEXT and len(keys) > 1:
        raise InputError(f"{file.path} is a text file, which has no keys: give one --json-keys, for the output's name")
    if file.format != PARQUET:
        return
    try:
        schema = pyarrow.parquet.read_schema(file.path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file.path} is not a complete Parquet file: {error}") from error
    texts = [field.name for field in schema if _is_text(field.type)]
    for key in keys:
        places = schema.get_all_field_indices(key)
        if len(places) > 1:
            raise InputError(f"{file.path} has {len(places)} columns {key!r}; rename all but one")
        if key not in texts:
            kind = f"column {key!r} is {schema.field(places[0]).type}" if places else f"no column {key!r}"
            raise InputError(f"{file.path}: {kind}; text columns: {', '.join(texts) or 'none'}")


def _is_text(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    kinds = pyarrow.types
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind))


class Stream:
    """The uncompressed content of a file; a context manager. Reading raises InputError for corrupt compressed data."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        """`offset`: bytes of content to skip; compressed files are decompressed up to there."""
        self._path = path
        self._file = path.open("rb")
        self._read: Callable[[int], bytes]
        if path.suffix == ".gz":
            self._read = cast(BinaryIO, gzip.GzipFile(fileobj=self._file)).read
        elif path.suffix == ".zst":
            self._read = _Zstandard(self._file).read
        elif path.suffix == ".bz2":
            self._read = bz2.BZ2File(self._file).read
        elif path.suffix == ".xz":
            self._read = lzma.LZMAFile(self._file).read  # noqa: SIM115 (`_file` is closed)
        else:
            self._file.seek(offset)
            self._read = self._file.read
            offset = 0
        while offset > 0:
            skipped = len(self.read(min(offset, 2**20)))
            if skipped == 0:
                raise InputError(f"{path} is shorter than before")
            offset -= skipped

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file, as stored, that were read."""
        return self._file.tell()

    def read(self, max_bytes: int) -> bytes:
        """The next bytes of the content, fewer than `max_bytes` only at its end."""
        parts, missing = [], max_bytes
        try:
            while missing > 0 and (part := self._read(missing)):
                parts.append(part)
                missing -= len(part)
        except (OSError, zlib.error, zstandard.ZstdError, lzma.LZMAError, EOFError) as error:
            # What gzip and bz2 say about content is an OSError without a number, unlike what the system says.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise InputError(f"{self._path} is corrupt or truncated: {error}") from error
        return b"".join(parts)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _Zstandard:
    """Decompresses all frames of a file; unlike the library's reader it raises for a truncated last frame."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame = self._next_frame()
        self._is_inside = False
        self._ready = b""

    def read(self, max_bytes: int) -> bytes:
        while not self._ready:
            stored = self._file.read(_CHUNK_BYTES)
            if not stored:
                if self._is_inside:
                    raise EOFError("it ends inside a frame")
                return b""
            parts = []
            while stored:
                self._is_inside = True
                parts.append(self._frame.decompress(stored))
                stored = self._frame.unused_data
                if self._frame.eof:
                    self._frame = self._next_frame()
                    self._is_inside = False
            self._ready = b"".join(parts)
        part, self._ready = self._ready[:max_bytes], self._ready[max_bytes:]
        return part

    @staticmethod
    def _next_frame() -> zstandard.ZstdDecompressionObj:
        return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
