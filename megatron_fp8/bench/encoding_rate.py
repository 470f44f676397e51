"""Owns the comparison of preprocessing with the `tokenizers` library alone, in turns, with as many processes.

Both are whole programs that read the text from a file. What each takes for one document, its start, is measured in each
round and taken out: it does not grow with the text. Rates are of text, by the clock and by the CPU time of all
processes: on a shared machine only the latter says much.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from megatron_fp8.config.load import process_environment
from megatron_fp8.data.corpus import read_corpus
from megatron_fp8.data.tokenizer import train_bpe

METHODS = ("encode_batch", "encode_batch_fast")
"""Of the library. Which is faster depends on the texts and the machine; rates are compared with the faster."""
SUBJECTS = ("ours", *METHODS)
_VOCAB_SIZE = 8192


@dataclass(frozen=True)
class EncodingRates:
    """What was measured; one number a round."""

    text_bytes: int
    num_documents: int
    num_processes: int
    by_clock: dict[str, list[float]]
    """Seconds of each subject."""
    by_cpu: dict[str, list[float]]
    """CPU seconds of each subject, all its processes together."""


def measure_encoding(
    directory: Path,
    num_processes: int,
    num_rounds: int,
    short: bool,
    tokenizer: Path | None,
    say: Callable[[str], None],
) -> EncodingRates:
    """Encode the standard library's text, a document a file, or a paragraph (`short`), in `directory`.

    `tokenizer`: a `tokenizer.json`; None: a byte-level BPE of 8192 tokens, trained now. Raises CorpusError,
    CalledProcessError and OSError.
    """
    texts = [document.text for document in read_corpus()]
    if tokenizer is None:
        tokenizer = directory / "tokenizer.json"
        say("training the tokenizer")
        train_bpe(texts, _VOCAB_SIZE, tokenizer)
    if short:
        texts = [paragraph for text in texts for paragraph in text.split("\n\n") if paragraph]
    path, start = directory / "texts.jsonl", directory / "start.jsonl"
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    path.write_text("".join(lines), encoding="utf-8")
    start.write_text(lines[0], encoding="utf-8")
    rates = EncodingRates(
        sum(len(text.encode()) for text in texts),
        len(texts),
        num_processes,
        {subject: [] for subject in SUBJECTS},
        {subject: [] for subject in SUBJECTS},
    )
    for number in range(num_rounds):
        # In turns, and first in turns too: what the machine does beside it hits both.
        for subject in (SUBJECTS * 2)[number % len(SUBJECTS) :][: len(SUBJECTS)]:
            rest = [str(directory / "out"), str(num_processes)]
            start_clock, start_cpu = _run(subject, [str(tokenizer), str(start), *rest])
            clock, cpu = _run(subject, [str(tokenizer), str(path), *rest])
            clock, cpu = clock - start_clock, cpu - start_cpu
            rates.by_clock[subject].append(clock)
            rates.by_cpu[subject].append(cpu)
            say(f"round {number + 1}, {subject}: {clock:.1f} s after a start of {start_clock:.1f} s; CPU {cpu:.1f} s")
    return rates


def _run(subject: str, arguments: Sequence[str]) -> tuple[float, float]:
    """(seconds, CPU seconds of all its processes) of one subject."""
    # One thread a process for both, whatever the number of cores.
    environment = {**process_environment(), "TOKENIZERS_PARALLELISM": "false"}
    before, start = _children_seconds(), time.perf_counter()
    command = [sys.executable, "-m", "megatron_fp8.bench.encoding_run", subject, *arguments]
    subprocess.run(command, env=environment, check=True)
    return time.perf_counter() - start, _children_seconds() - before


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def encoding_table(rates: EncodingRates) -> Table:
    """Medians, and the ratio of the rates round by round, to the library's faster method in each."""
    title = f"{rates.text_bytes / 1e6:.1f} MB in {rates.num_documents:,} documents, {rates.num_processes} processes"
    table = Table(title=title)
    for column in ("", "preprocess_data.py", *METHODS, "ratio to the faster (range over rounds)"):
        table.add_column(column)
    for title_of_row, seconds in (("MB/s by the clock", rates.by_clock), ("MB per CPU second", rates.by_cpu)):
        of_subject = {name: [rates.text_bytes / 1e6 / value for value in seconds[name]] for name in SUBJECTS}
        library = [max(rates_of_round) for rates_of_round in zip(*(of_subject[name] for name in METHODS), strict=True)]
        ratios = [mine / theirs for mine, theirs in zip(of_subject["ours"], library, strict=True)]
        table.add_row(
            title_of_row,
            *(f"{statistics.median(of_subject[name]):.2f}" for name in SUBJECTS),
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        )
    return table
