"""Makes the quickstart's data: a tokenizer, and train and validation token files of the standard library's text."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from megatron_fp8.prepare.quickstart import SPLITS, CorpusError, Summary, complete_summary, prepare

MIN_VOCAB_SIZE = 257


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The settings of a command line; wrong usage exits with code 2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory for tokenizer.json, train.* and valid.*")
    parser.add_argument("--vocab-size", type=int, default=4096, help="vocabulary size of the BPE (default: 4096)")
    parser.add_argument("--force", action="store_true", help="make the files again even if they are complete")
    settings = parser.parse_args(arguments)
    if settings.vocab_size < MIN_VOCAB_SIZE:
        parser.error(
            f"--vocab-size {settings.vocab_size}: too small for 256 bytes and the end-of-document token; "
            f"use at least {MIN_VOCAB_SIZE}"
        )
    if settings.output.exists() and not settings.output.is_dir():
        parser.error(f"--output {settings.output}: it is a file; name a directory")
    return settings


def show(summary: Summary, directory: Path, state: str) -> None:
    """Print a summary."""
    parts = [
        f"{split}: {summary.num_tokens[split]:,} tokens in {summary.num_documents[split]:,} documents"
        for split in SPLITS
    ]
    tokens = sum(summary.num_tokens.values())
    print(f"{directory}: {state}. {'; '.join(parts)}.")
    print(
        f"Vocabulary {summary.vocab_size:,}; {summary.text_bytes / 1e6:.1f} MB of text, "
        f"{summary.text_bytes / tokens:.2f} bytes per token."
    )


def make(directory: Path, vocab_size: int) -> Summary:
    """Make the files under a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as display:
        task = display.add_task("reading the standard library", total=None)

        def on_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
            display.update(task, description=stage, completed=done_bytes, total=total_bytes)

        return prepare(directory, vocab_size, on_progress)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: the directory is complete; 2: it cannot be made."""
    settings = parse_arguments(arguments)
    summary = None if settings.force else complete_summary(settings.output, settings.vocab_size)
    if summary is not None:
        show(summary, settings.output, "already complete")
        return 0
    start = time.perf_counter()
    try:
        summary = make(settings.output, settings.vocab_size)
    except (CorpusError, OSError) as error:
        print(f"--output {settings.output}: {error}", file=sys.stderr)
        return 2
    show(summary, settings.output, f"made in {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
