"""Owns the quickstart's data directory: standard-library text -> tokenizer -> train and validation files.

Imports no torch. A `complete.json` is written last; a directory without it, or with files of other sizes than
it says, is made again, so an interrupted or damaged preparation repairs itself.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
"""Raised when the same settings would give other files."""
SPLITS = ("train", "valid")
TOKENIZER_FILE = "tokenizer.json"
DATA_FILES = (TOKENIZER_FILE, *(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx")))
COMPLETE_FILE = "complete.json"


@dataclass(frozen=True)
class Summary:
    """What a complete directory holds."""

    vocab_size: int
    """Tokens of the tokenizer; below what was asked for when the corpus is too small."""
    num_documents: dict[str, int]
    """By split."""
    num_tokens: dict[str, int]
    """By split."""
    text_bytes: int


@dataclass(frozen=True)
class Progress:
    """One step of the work, for display."""

    stage: str
    done_bytes: int
    total_bytes: int


def complete_summary(directory: Path, vocab_size: int) -> Summary | None:
    """The summary of a directory that is complete for this `vocab_size`; None: it must be made."""
    try:
        record = json.loads((directory / COMPLETE_FILE).read_text(encoding="utf-8"))
        if (record["format"], record["asked_vocab_size"]) != (FORMAT, vocab_size):
            return None
        sizes_bytes = {name: (directory / name).stat().st_size for name in DATA_FILES}
        return Summary(**record["summary"]) if record["sizes_bytes"] == sizes_bytes else None
    except (OSError, ValueError, KeyError, TypeError):
        # Any damage to the record means the same as no record: make the files again.
        return None


def prepare(directory: Path, vocab_size: int, on_progress: Callable[[Progress], None]) -> Summary:
    """Make the files. Raises CorpusError without text, ValueError for too small a vocabulary, OSError."""
    # Imported here so that recognizing a complete directory costs no start-up time.
    from megatron_fp8.data.corpus import read_corpus
    from megatron_fp8.data.encode import encode_documents
    from megatron_fp8.data.token_file import TokenFileWriter
    from megatron_fp8.data.tokenizer import train_bpe

    directory.mkdir(parents=True, exist_ok=True)
    (directory / COMPLETE_FILE).unlink(missing_ok=True)
    documents = read_corpus()
    total_bytes = sum(len(document.text.encode()) for document in documents)
    on_progress(Progress("training the tokenizer", 0, total_bytes))
    # Held-out documents take no part in the tokenizer either.
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
                on_progress(Progress(f"encoding {split}", done_bytes, total_bytes))
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
