"""Owns the note of how far preprocessing has come, by which it goes on after the process was killed.

The note belongs to one piece of work: the same inputs, tokenizer and settings. Another's is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_fp8.data.encode import Settings
from megatron_fp8.data.growing_file import GrowthState
from megatron_fp8.data.sources.block import Position
from megatron_fp8.data.sources.files import InputFile
from megatron_fp8.data.tokenizer import Tokenizer

FORMAT = 3
"""Raised when the same work would give other bytes."""
_LIBRARIES = ("tokenizers", "sentencepiece", "tiktoken")


@dataclass
class Progress:
    """What has been read and written."""

    position: Position
    by_key: dict[str, GrowthState]
    text_bytes: int = 0
    num_broken: int = 0
    broken: tuple[str, ...] = ()
    """The first few broken lines, as a person reads them."""
    all_read: bool = False


class ProgressFile:
    """The note at `PREFIX.progress.json`."""

    def __init__(self, output_prefix: str, work: str) -> None:
        """`work`: `describe_work`'s text."""
        self._path = Path(f"{output_prefix}.progress.json")
        self._work = work

    def read(self) -> Progress | None:
        """How far this work has come; None without a note, or when it is of other work."""
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
            if record["work"] != self._work:
                return None
            progress: dict[str, Any] = record["progress"]
            return Progress(
                **{
                    **progress,
                    "position": Position(**progress["position"]),
                    "by_key": {key: GrowthState(**state) for key, state in progress["by_key"].items()},
                    "broken": tuple(progress["broken"]),
                }
            )
        except (OSError, ValueError, KeyError, TypeError):
            # Any damage to the note means the same as no note: begin again.
            return None

    def write(self, progress: Progress) -> None:
        """Replace the note; what it says must be on the disk by now."""
        temporary = Path(f"{self._path}.incomplete")
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump({"work": self._work, "progress": asdict(progress)}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self._path)

    def remove(self) -> None:
        """The work is done, or given up."""
        self._path.unlink(missing_ok=True)
        Path(f"{self._path}.incomplete").unlink(missing_ok=True)


def describe_work(files: Sequence[InputFile], settings: Settings, tokenizer: Tokenizer, block_bytes: int) -> str:
    """A digest of everything that decides which bytes are written; `tokenizer` is that of `settings`."""
    content = Path(tokenizer.path).read_bytes() if tokenizer.path is not None else b""
    work = {
        "format": FORMAT,
        "files": [[str(file.path), file.format, file.size_bytes, file.modified_ns] for file in files],
        "tokenizer": [tokenizer.tokenizer_type, hashlib.sha256(content).hexdigest(), tokenizer.eod_id],
        "pattern": settings.tokenizer.tiktoken_pattern,
        "settings": [settings.keys, settings.append_eod, settings.skip_broken_lines],
        "block_bytes": block_bytes,
        "libraries": {name: version(name) for name in _LIBRARIES},
    }
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()
