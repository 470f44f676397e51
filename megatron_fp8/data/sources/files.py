"""Owns which files the inputs are, in which order, and in which format each is. Reads nothing but Parquet's schema."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from megatron_fp8.data.sources.block import InputError
from megatron_fp8.data.sources.stream import COMPRESSED

JSONL, PARQUET, TEXT, AUTO = "jsonl", "parquet", "text", "auto"
FORMATS = (AUTO, JSONL, PARQUET, TEXT)
_FORMAT_OF_SUFFIX = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), JSONL),
    ".parquet": PARQUET,
    **dict.fromkeys((".txt", ".text", ".md"), TEXT),
}


@dataclass(frozen=True)
class InputFile:
    """A file of texts as it was found."""

    path: Path
    format: str
    size_bytes: int
    modified_ns: int


def find_inputs(names: Sequence[str], input_format: str, keys: Sequence[str]) -> list[InputFile]:
    """The files that paths, folders and patterns name, in this order, and sorted within each of them.

    A folder's files are all those in it and below, through links too, but hidden ones. Format `auto`: by suffix; where
    that says nothing, a file is JSON Lines when it was named and text when it was in a folder. Raises InputError.
    """
    found: dict[Path, InputFile] = {}
    for name in names:
        for path, unknown in _paths(name):
            # However it is spelled, and through links.
            place = path.resolve()
            if place in found:
                also = f", as {found[place].path} too" if found[place].path != path else ""
                raise InputError(f"{path} is named twice{also}: its texts would be encoded twice")
            status = path.stat()
            suffix = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
            kind = input_format if input_format != AUTO else _FORMAT_OF_SUFFIX.get(suffix.lower(), unknown)
            found[place] = InputFile(path, kind, status.st_size, status.st_mtime_ns)
    for file in found.values():
        _check(file, keys)
    return list(found.values())


def _paths(name: str) -> Iterator[tuple[Path, str]]:
    """(path, its format where its suffix says none) of each file that one name stands for."""
    path = Path(name)
    if path.is_dir():
        files = sorted(file for file in _below(path) if file.is_file() and not _is_hidden(file.relative_to(path)))
        if not files:
            raise InputError(f"{name} is a folder without files")
        yield from ((file, TEXT) for file in files)
    elif path.is_file():
        yield path, JSONL
    elif glob.has_magic(name):
        matching = sorted(Path(match) for match in glob.glob(name, recursive=True))  # noqa: PTH207 (a pattern may be absolute)
        if not any(file.is_file() for file in matching):
            raise InputError(f"{name} fits no file")
        yield from ((file, JSONL) for file in matching if file.is_file())
    elif path.exists():
        raise InputError(f"{name} is neither a file nor a folder: work that was killed could not go on with it")
    else:
        raise InputError(f"{name} does not exist; name files, folders or patterns such as 'texts/*.jsonl.gz'")


def _below(folder: Path) -> Iterator[Path]:
    """All names in a folder and in those in it, each folder once, whatever links lead there."""
    seen: set[Path] = set()
    for directory, below, names in os.walk(folder, followlinks=True):
        place = Path(directory).resolve()
        if place in seen:
            below.clear()
            continue
        seen.add(place)
        below.sort()
        yield from (Path(directory) / name for name in names)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _check(file: InputFile, keys: Sequence[str]) -> None:
    if file.format == TEXT and len(keys) > 1:
        raise InputError(f"{file.path} is a text, which has no keys: name one in --json-keys, for the output's name")
    if file.format != PARQUET:
        return
    try:
        schema = pyarrow.parquet.read_schema(file.path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file.path} is not a whole Parquet file: {error}") from error
    texts = [field.name for field in schema if _is_text(field.type)]
    for key in keys:
        places = schema.get_all_field_indices(key)
        if len(places) > 1:
            raise InputError(f"{file.path} has {len(places)} columns {key!r}: rename all but one")
        if key not in texts:
            kind = f"a column of {schema.field(places[0]).type}" if places else "no column"
            raise InputError(f"{file.path}: {key!r} is {kind}; columns of text: {', '.join(texts) or 'none'}")


def _is_text(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind)
