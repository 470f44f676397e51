"""Makes the quickstart's data: text of the Python standard library -> tokenizer -> train and validation token files.

The text is real and on every machine, so nothing is downloaded or committed. One file is one document, and one `pydoc`
topic is one document. Left out: installed packages (different on every machine), tests (half of the library, missing
from many distributions), `encodings` (tables of bytes) and generated build settings.

A `complete.json` is written last; a directory without it, or with files of other sizes than it says, is made again, so
interrupted or corrupt preparations repair themselves.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

FORMAT = 1
"""Incremented when the same settings would give other files."""
SPLITS = ("train", "valid")
TOKENIZER_FILE = "tokenizer.json"
DATA_FILES = (TOKENIZER_FILE, *(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx")))
COMPLETE_FILE = "complete.json"
OnProgress = Callable[[str, int, int], None]
"""Called with a stage of the work, its bytes of text that are done, and all bytes of text."""
EXCLUDED_DIRECTORIES = frozenset(
    "site-packages dist-packages __pycache__ test tests idle_test testmock encodings ensurepip pydoc_data".split()
)
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")
MAX_CORPUS_BYTES = 16 * 2**20
MIN_CORPUS_BYTES = 2**20
VALIDATION_SHARE = 0.05


@dataclass(frozen=True)
class Summary:
    """What a complete directory holds, by split."""

    vocab_size: int
    """Tokens of the tokenizer; fewer than requested if the corpus is too small."""
    num_documents: dict[str, int]
    num_tokens: dict[str, int]
    text_bytes: int


def complete_summary(directory: Path, vocab_size: int) -> Summary | None:
    """The summary of a directory that is complete for this `vocab_size`; None if it is not."""
    try:
        record = json.loads((directory / COMPLETE_FILE).read_text(encoding="utf-8"))
        if (record["format"], record["asked_vocab_size"]) != (FORMAT, vocab_size):
            return None
        sizes_bytes = {name: (directory / name).stat().st_size for name in DATA_FILES}
        return Summary(**record["summary"]) if record["sizes_bytes"] == sizes_bytes else None
    except (OSError, ValueError, KeyError, TypeError):
        # A corrupt record is as good as none: make the files again.
        return None


def prepare(directory: Path, vocab_size: int, on_progress: OnProgress) -> Summary:
    """Make the files. Raises CorpusError, OSError, and ValueError for a vocabulary below 257 tokens."""
    # Imported here so that recognizing a complete directory is fast.
    from megatron_fp8.prepare.encode import encode_documents
    from megatron_fp8.prepare.token_file_writer import TokenFileWriter
    from megatron_fp8.prepare.train_tokenizer import train_bpe

    directory.mkdir(parents=True, exist_ok=True)
    (directory / COMPLETE_FILE).unlink(missing_ok=True)
    documents = read_corpus()
    total_bytes = sum(len(document.text.encode()) for document in documents)
    on_progress("training the tokenizer", 0, total_bytes)
    # The tokenizer is not trained on held-out documents either.
    training_texts = [document.text for document in documents if not document.is_validation]
    tokenizer = train_bpe(training_texts, vocab_size, directory / TOKENIZER_FILE)

    done_bytes = 0
    num_documents: dict[str, int] = {}
    num_tokens: dict[str, int] = {}
    for split in SPLITS:
        with TokenFileWriter(directory / split, tokenizer.vocab_size) as writer:
            for document in documents:
                if document.is_validation != (split == "valid"):
                    continue
                encoded = encode_documents([document.text], tokenizer, append_eod=True)
                writer.add_documents(encoded.tokens, encoded.lengths_tokens)
                done_bytes += encoded.text_bytes
                on_progress(f"encoding {split}", done_bytes, total_bytes)
        num_documents[split], num_tokens[split] = writer.num_documents, writer.num_tokens
    summary = Summary(tokenizer.vocab_size, num_documents, num_tokens, total_bytes)
    _write_complete(directory, vocab_size, summary)
    return summary


def _write_complete(directory: Path, vocab_size: int, summary: Summary) -> None:
    record: dict[str, Any] = {
        "format": FORMAT,
        "asked_vocab_size": vocab_size,
        "python": platform.python_version(),
        "sizes_bytes": {name: (directory / name).stat().st_size for name in DATA_FILES},
        "summary": asdict(summary),
    }
    temporary = directory / f"{COMPLETE_FILE}.incomplete"
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    temporary.replace(directory / COMPLETE_FILE)


class CorpusError(Exception):
    """This machine's standard library has too little text to train on; the message says where it is."""


@dataclass(frozen=True)
class Document:
    """A document and its name, which decides its position and its split."""

    name: str
    text: str

    @property
    def is_validation(self) -> bool:
        """Whether it is held out: by a hash of its name, independent of other documents."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:8], "big") < VALIDATION_SHARE * 2**64


def read_corpus(directory: Path | None = None, limit_bytes: int = MAX_CORPUS_BYTES) -> list[Document]:
    """The documents, by name; `directory`: the standard library's (default: this Python's).

    Ends before the document that would exceed `limit_bytes`, which bounds the time that preparing takes. Raises
    CorpusError for less than 1 MiB.
    """
    root = directory if directory is not None else Path(sysconfig.get_paths()["stdlib"])
    documents: list[Document] = []
    total_bytes = 0
    for document in _every_document(root):
        total_bytes += len(document.text.encode())
        if total_bytes > limit_bytes:
            break
        documents.append(document)
    if total_bytes < min(MIN_CORPUS_BYTES, limit_bytes):
        raise CorpusError(
            f"the Python standard library in {root} has only {total_bytes:,} bytes of source text: it is stripped, "
            "compiled or inside a zip file. Use a Python with its sources (python.org, pyenv, a distribution's full "
            "package), or make token files of your own text with tools/preprocess_data.py"
        )
    return documents


def _every_document(root: Path) -> Iterator[Document]:
    # Topics first: they are the only prose, and the size limit must not exclude them.
    yield from _topics(root)
    files = sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix())
    for file in files:
        name = file.relative_to(root).as_posix()
        parts = PurePosixPath(name).parts
        if EXCLUDED_DIRECTORIES.intersection(parts[:-1]) or any(part.startswith(EXCLUDED_PREFIXES) for part in parts):
            continue
        # The few files in other encodings are test data.
        with suppress(UnicodeDecodeError):
            if text := file.read_text(encoding="utf-8"):
                yield Document(name, text)


def _topics(root: Path) -> Iterator[Document]:
    """The texts of `help("...")`; missing where a distribution packages them separately."""
    if (root / "pydoc_data" / "topics.py").is_file():
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        for name in sorted(topics):
            yield Document(f"pydoc_data/topics/{name}", topics[name])
