"""Owns the quickstart's text: source and documentation of the Python standard library it runs on.

Real text that every machine has, so nothing is downloaded or committed. Imports no torch, knows nothing of
tokens.

One file is one document and one `pydoc` topic is one document. Long files are not divided: training samples
are cut out of the token stream anyway, and a whole file needs no parser that would differ between versions.
Left out: installed packages (not the same on two machines), tests (half of the library, missing from many
distributions, much of it tables), `encodings` (tables of bytes) and generated build settings.
"""

from __future__ import annotations

import hashlib
import importlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

LEFT_OUT_DIRECTORIES = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "testmock",
        "encodings",
        "ensurepip",
        "pydoc_data",
    }
)
LEFT_OUT_PREFIXES = ("_sysconfigdata", "config-")
LARGEST_CORPUS_BYTES = 16 * 2**20
SMALLEST_CORPUS_BYTES = 2**20
VALIDATION_SHARE = 0.05


class CorpusError(Exception):
    """This machine's standard library has no text to train on; the text says where it was looked for."""


@dataclass(frozen=True)
class Document:
    """One document and the name that decides its order and its split."""

    name: str
    text: str

    @property
    def is_validation(self) -> bool:
        """Whether it is held out: by a hash of its name, so that no other document changes it."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:8], "big") < VALIDATION_SHARE * 2**64


def read_corpus(directory: Path | None = None, limit_bytes: int = LARGEST_CORPUS_BYTES) -> list[Document]:
    """The documents, in order of name; `directory`: where the standard library lies (default: this Python's).

    Ends before the document that would take the text beyond `limit_bytes`, which bounds the time that
    preparing takes. Raises CorpusError when less than 1 MiB is found.
    """
    root = directory if directory is not None else Path(sysconfig.get_paths()["stdlib"])
    documents: list[Document] = []
    total_bytes = 0
    for document in _every_document(root):
        total_bytes += len(document.text.encode())
        if total_bytes > limit_bytes:
            break
        documents.append(document)
    if total_bytes < min(SMALLEST_CORPUS_BYTES, limit_bytes):
        raise CorpusError(
            f"The Python standard library in {root} has {total_bytes:,} bytes of source text, too few to "
            f"train on: it is stripped, compiled or inside a zip file. Use a Python with its sources "
            f"(python.org, pyenv, a distribution's full package), or make token files of text of your own "
            f"with tools/preprocess_data.py."
        )
    return documents


def _every_document(root: Path) -> Iterator[Document]:
    # Topics first: they are the only prose, and a size limit must not cut them off.
    yield from _topics(root)
    files = sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix())
    for file in files:
        name = file.relative_to(root).as_posix()
        if not _is_left_out(name):
            text = _text_of(file)
            if text:
                yield Document(name, text)


def _topics(root: Path) -> Iterator[Document]:
    """The texts of `help("...")`, each one a document; absent where a distribution split them off."""
    if not (root / "pydoc_data" / "topics.py").is_file():
        return
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield Document(f"pydoc_data/topics/{name}", topics[name])


def _is_left_out(name: str) -> bool:
    *directories, file = PurePosixPath(name).parts
    if any(directory in LEFT_OUT_DIRECTORIES for directory in directories):
        return True
    return any(part.startswith(LEFT_OUT_PREFIXES) for part in (*directories, file))


def _text_of(file: Path) -> str | None:
    """The file's text; None for the few in another encoding: they are test data of the decoder, not text."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
