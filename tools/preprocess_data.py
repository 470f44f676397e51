"""JSON Lines to Megatron token files: one `PREFIX_KEY_document.bin/.idx` pair per JSON key.

Each line of the input is an object with a text under each key. The files' bytes do not depend on --workers.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron_fp8.data.preprocess import (
    BrokenLineError,
    EncodedBlock,
    NoTextError,
    Settings,
    Totals,
    output_prefix_of,
    preprocess,
)
from megatron_fp8.data.tokenizer import Tokenizer, TokenizerError


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line to settings, every path checked; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="JSON Lines file")
    parser.add_argument(
        "--output-prefix", required=True, help="path of the token files without _KEY_document and suffix"
    )
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys whose texts are encoded (default: text)")
    parser.add_argument("--tokenizer-model", required=True, help="path of a tokenizer.json")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--workers", type=int, default=1, help="encoding processes (default: 1)")
    parser.add_argument("--skip-broken-lines", action="store_true", help="count broken lines and go on; without: stop")
    settings = parser.parse_args(arguments)
    if settings.input.is_dir():
        parser.error(f"--input {settings.input}: is a directory; name one JSON Lines file")
    if not settings.input.is_file():
        parser.error(f"--input {settings.input}: does not exist; name a JSON Lines file")
    if settings.workers < 1:
        parser.error(f"--workers {settings.workers}: use at least 1")
    if len(set(settings.json_keys)) != len(settings.json_keys):
        parser.error(f"--json-keys {' '.join(settings.json_keys)}: name each key once")
    directory = Path(settings.output_prefix).parent
    if not directory.is_dir():
        parser.error(f"--output-prefix {settings.output_prefix}: there is no directory {directory}; make it first")
    try:
        Tokenizer.load(settings.tokenizer_model)
    except TokenizerError as error:
        parser.error(f"--tokenizer-model {settings.tokenizer_model}: {error.reason}; {error.use_instead}")
    return settings


def run(settings: argparse.Namespace, worker_settings: Settings) -> Totals:
    """Encode under a progress display."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    start = time.perf_counter()
    num_documents = 0
    with Progress(*columns, console=Console(stderr=True)) as display:
        task = display.add_task(settings.input.name, total=settings.input.stat().st_size, rate="")

        def on_block(block: EncodedBlock) -> None:
            nonlocal num_documents
            num_documents += sum(len(encoded.lengths_tokens) for encoded in block.by_key.values())
            rate = num_documents / (time.perf_counter() - start)
            display.update(task, advance=block.size_bytes, rate=f"{rate:,.0f} documents/s")

        return preprocess(settings.input, settings.output_prefix, worker_settings, settings.workers, on_block)


def show(totals: Totals, settings: argparse.Namespace, seconds: float) -> None:
    """The summary: what was written, where, and what was left out."""
    for key in settings.json_keys:
        print(f"wrote {output_prefix_of(settings.output_prefix, key)}.bin and .idx")
    ratio = totals.bytes_per_token
    print(
        f"documents {totals.num_documents:,}  tokens {totals.num_tokens:,}  bytes per token "
        f"{f'{ratio:.2f}' if ratio else 'none'}  empty documents {totals.num_empty:,}  broken lines "
        f"{totals.num_broken:,}"
    )
    megabytes = settings.input.stat().st_size / 1e6
    print(f"{seconds:.1f} s, {totals.num_documents / seconds:,.0f} documents/s, {megabytes / seconds:.1f} MB/s")
    for error in totals.broken:
        print(f"left out: {error}")
    if totals.num_broken > len(totals.broken):
        print(f"left out: {totals.num_broken - len(totals.broken):,} more")


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: the files are written; 2: an input is wrong and nothing is written."""
    settings = parse_arguments(arguments)
    worker_settings = Settings(
        settings.tokenizer_model, tuple(settings.json_keys), settings.append_eod, settings.skip_broken_lines
    )
    start = time.perf_counter()
    try:
        totals = run(settings, worker_settings)
    except BrokenLineError as error:
        flag = f"--json-keys {' '.join(settings.json_keys)}" if error.missing_key else "--input"
        print(
            f"{flag}: {settings.input}, line {error.line_number}: {error.reason}. Mend the line or name "
            f"other keys, or give --skip-broken-lines to leave such lines out. Nothing was written.",
            file=sys.stderr,
        )
        return 2
    except NoTextError as error:
        print(f"--input {settings.input}: {error}. Nothing was written.", file=sys.stderr)
        return 2
    show(totals, settings, time.perf_counter() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
