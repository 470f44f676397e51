"""Owns the command line of tools/preprocess_data.py: its options, what is wrong with them, what a person is shown."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from megatron_fp8.data.encode import BrokenLineError, Settings, TokenizerFile
from megatron_fp8.data.growing_file import GrowingFileError
from megatron_fp8.data.preprocess import (
    NoTextError,
    Pace,
    Totals,
    files_to_replace,
    output_prefix_of,
    preprocess,
)
from megatron_fp8.data.progress_display import ProgressDisplay
from megatron_fp8.data.sources.block import InputError
from megatron_fp8.data.sources.files import FORMATS, InputFile, find_inputs
from megatron_fp8.data.token_file import bin_path, idx_path
from megatron_fp8.data.tokenizer import END_OF_DOCUMENT, HUGGING_FACE, TOKENIZER_TYPES, Tokenizer, TokenizerError
from megatron_fp8.data.train_tokenizer import MOST_TRAINING_BYTES, train_on_files
from megatron_fp8.data.vocab.gpt2_files import convert_gpt2_files
from megatron_fp8.data.worker_pool import WorkerEndedError

DESCRIPTION = """Texts to Megatron token files: one PREFIX_KEY_document.bin/.idx pair per key.

Inputs are JSON Lines, Parquet, or text files, each a document; plain, .gz or .zst. The files' bytes do not depend on
--workers. Killed at any time, the same command goes on where it was.
"""
GPT2_TYPE = "GPT2BPETokenizer"
_SMALLEST_VOCABULARY = 257


def make_parser() -> argparse.ArgumentParser:
    """The options; those that Megatron's tool has are named as there."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # The whole list, fourteen lines, would stand before what is wrong.
        usage="%(prog)s --input PATH ... --output-prefix PREFIX [--tokenizer-model FILE] [--append-eod] [OPTIONS]",
    )
    texts = parser.add_argument_group("texts")
    texts.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, folders or patterns")
    texts.add_argument(
        "--input-format",
        choices=FORMATS,
        default="auto",
        help="auto: by suffix; without a known one, named files are jsonl and those in folders text",
    )
    texts.add_argument("--json-keys", nargs="+", default=["text"], help="keys or columns to encode (default: text)")
    texts.add_argument("--skip-broken-lines", action="store_true", help="count broken lines and go on; without: stop")
    tokens = parser.add_argument_group("tokenizer")
    tokens.add_argument("--tokenizer-model", help="tokenizer.json, SentencePiece .model, ranks, or a folder with one")
    tokens.add_argument(
        "--tokenizer-type", choices=(*TOKENIZER_TYPES, GPT2_TYPE), default="auto", help="default: seen from the file"
    )
    tokens.add_argument("--vocab-file", metavar="JSON", help="GPT-2's vocabulary; with --merge-file")
    tokens.add_argument(
        "--merge-file",
        metavar="TXT",
        help="GPT-2's merges; with --vocab-file they become --tokenizer-model (default: PREFIX_tokenizer.json)",
    )
    tokens.add_argument(
        "--eod-token", help="name of the token that ends documents (default: <|endoftext|>, or its own)"
    )
    tokens.add_argument("--tiktoken-pattern", help="for ranks: gpt2, cl100k_base, o200k_base, v1, v2 or an expression")
    tokens.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    tokens.add_argument(
        "--train-bpe", type=int, metavar="VOCAB_SIZE", help="train a byte-level BPE and write it to --tokenizer-model"
    )
    tokens.add_argument(
        "--train-bpe-bytes", type=int, default=MOST_TRAINING_BYTES, help="text to train on at most (default: 1 GiB)"
    )
    work = parser.add_argument_group("work")
    work.add_argument("--output-prefix", required=True, help="path of the token files without _KEY_document and suffix")
    work.add_argument("--overwrite", action="store_true", help="replace token files that exist")
    work.add_argument("--workers", type=int, default=1, help="encoding processes (default: 1)")
    work.add_argument("--partitions", type=int, help="of Megatron's tool; not needed: --workers shares any input")
    work.add_argument("--log-interval", type=int, help="documents between progress lines where there is no terminal")
    work.add_argument("--save-seconds", type=float, default=10.0, help="work lost when killed, at most (default: 10)")
    return parser


def parse_arguments(arguments: list[str] | None) -> tuple[argparse.Namespace, list[InputFile]]:
    """Command line to settings and inputs; all that is wrong is said at once, with exit code 2."""
    parser = make_parser()
    settings = parser.parse_args(arguments)
    wrong = [
        f"--{name.replace('_', '-')} {getattr(settings, name)}: use at least 1"
        for name in ("workers", "partitions", "log_interval", "train_bpe_bytes")
        if getattr(settings, name) is not None and getattr(settings, name) < 1
    ]
    if len(set(settings.json_keys)) != len(settings.json_keys):
        wrong.append(f"--json-keys {' '.join(settings.json_keys)}: name each key once")
    wrong += [
        f"--json-keys {key}: it becomes part of the output's name, where / cannot be; rename the key in the input"
        for key in settings.json_keys
        if "/" in key
    ]
    directory = Path(settings.output_prefix).parent
    if not directory.is_dir():
        wrong.append(f"--output-prefix {settings.output_prefix}: there is no directory {directory}; make it first")
    for name in settings.input:
        if Path(name).is_dir() and Path(name).resolve() in (directory / "file").resolve().parents:
            wrong.append(
                f"--output-prefix {settings.output_prefix}: it is in --input {name}, and would be read as text"
            )
    files: list[InputFile] = []
    try:
        files = find_inputs(settings.input, settings.input_format, settings.json_keys)
    except (InputError, OSError) as error:
        wrong.append(f"--input {' '.join(settings.input)}: {error}")
    wrong += _wrong_gpt2_options(settings)
    if settings.vocab_file is not None and not wrong:
        # Only when nothing else is wrong, since a file is written.
        wrong += _wrong_gpt2_files(settings)
    # While something is wrong with the files of which it is made, there is no tokenizer.
    is_gpt2 = settings.tokenizer_type == GPT2_TYPE or settings.vocab_file is not None or settings.merge_file is not None
    wrong_tokenizer = [] if wrong and is_gpt2 else _wrong_tokenizer(settings)
    if not (wrong or wrong_tokenizer or settings.overwrite):
        wrong += _wrong_output(settings, files)
    wrong += wrong_tokenizer
    if wrong:
        parser.error("\n".join(wrong))
    return settings, files


def _wrong_gpt2_options(settings: argparse.Namespace) -> list[str]:
    """What is wrong with the options of GPT-2's two files, or that they are missing."""
    given = settings.vocab_file, settings.merge_file
    if None in given:
        is_meant = settings.tokenizer_type == GPT2_TYPE or given != (None, None)
        return ["--vocab-file, --merge-file: name both for a tokenizer of GPT-2's two files"] if is_meant else []
    if settings.train_bpe is not None or settings.tokenizer_type not in ("auto", GPT2_TYPE):
        return ["--vocab-file, --merge-file: they are a tokenizer; leave --train-bpe and --tokenizer-type out"]
    path = Path(settings.tokenizer_model or f"{settings.output_prefix}_tokenizer.json")
    if path.is_dir() or not path.parent.is_dir():
        return [f"--tokenizer-model {path}: name the file to write the tokenizer to, in a directory"]
    return []


def _wrong_gpt2_files(settings: argparse.Namespace) -> list[str]:
    """What is wrong with GPT-2's two files; where nothing is, they become --tokenizer-model."""
    path = Path(settings.tokenizer_model or f"{settings.output_prefix}_tokenizer.json")
    try:
        convert_gpt2_files(Path(settings.vocab_file), Path(settings.merge_file), settings.eod_token, path)
    except TokenizerError as error:
        return [f"--vocab-file {settings.vocab_file} --merge-file {settings.merge_file}: {error}"]
    if settings.tokenizer_model is None:
        print(f"--vocab-file and --merge-file are {path} now: name it in a config's data.tokenizer_model")
    settings.tokenizer_model, settings.tokenizer_type = str(path), HUGGING_FACE
    return []


def _wrong_output(settings: argparse.Namespace, files: list[InputFile]) -> list[str]:
    """Token files that would be replaced."""
    if settings.train_bpe is not None and not Path(settings.tokenizer_model).exists():
        # No work that was killed had this tokenizer.
        prefixes = [output_prefix_of(settings.output_prefix, key) for key in settings.json_keys]
        found = [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
    else:
        found = files_to_replace(files, settings.output_prefix, settings_of(settings))
    names = ", ".join(map(str, found))
    return (
        [f"--output-prefix {settings.output_prefix}: {names} exist; use another name, or --overwrite"] if found else []
    )


def _wrong_tokenizer(settings: argparse.Namespace) -> list[str]:
    """What is wrong with the options of the tokenizer."""
    path = settings.tokenizer_model
    if settings.train_bpe is not None:
        if settings.train_bpe < _SMALLEST_VOCABULARY:
            return [f"--train-bpe {settings.train_bpe}: 256 bytes and <|endoftext|> must fit; use at least 257"]
        if path is None or Path(path).is_dir() or not Path(path).parent.is_dir():
            return [f"--tokenizer-model {path}: name the file to write the trained tokenizer to, in a directory"]
        if settings.tokenizer_type not in ("auto", "HuggingFaceTokenizer"):
            return [f"--tokenizer-type {settings.tokenizer_type}: --train-bpe makes a HuggingFaceTokenizer"]
        if settings.eod_token not in (None, END_OF_DOCUMENT):
            return [f"--eod-token {settings.eod_token}: --train-bpe makes {END_OF_DOCUMENT}; leave it out"]
        if not Path(path).exists():
            return []
    try:
        tokenizer = tokenizer_of(settings).load()
    except TokenizerError as error:
        return [error.as_option(getattr(settings, error.key))]
    if settings.train_bpe is not None and tokenizer.vocab_size > settings.train_bpe:
        return [
            f"--tokenizer-model {path}: exists and has {tokenizer.vocab_size} tokens, more than --train-bpe "
            f"{settings.train_bpe}; name another file, or leave --train-bpe out to use this one"
        ]
    return []


def settings_of(settings: argparse.Namespace) -> Settings:
    """What every worker must know."""
    keys = tuple(settings.json_keys)
    return Settings(tokenizer_of(settings), keys, settings.append_eod, settings.skip_broken_lines)


def tokenizer_of(settings: argparse.Namespace) -> TokenizerFile:
    """How to load the tokenizer."""
    return TokenizerFile(
        settings.tokenizer_model, settings.tokenizer_type, settings.eod_token, settings.tiktoken_pattern
    )


def train(settings: argparse.Namespace, worker_settings: Settings, files: list[InputFile]) -> None:
    """Train the tokenizer, unless a run that was killed has done so."""
    path = Path(settings.tokenizer_model)
    if path.exists():
        size = Tokenizer.load(path).vocab_size
        print(f"{path} exists ({size:,} tokens): used, not trained again")
        return
    with ProgressDisplay(files, "reading", settings.log_interval) as display:
        tokenizer = train_on_files(
            files, worker_settings, settings.train_bpe, path, settings.train_bpe_bytes, display.passed
        )
    fewer = tokenizer.vocab_size < settings.train_bpe
    why = f"; the texts have no more pairs to merge for the {settings.train_bpe:,} of --train-bpe" if fewer else ""
    print(f"wrote {path}: {tokenizer.vocab_size:,} tokens{why}")


def encode(settings: argparse.Namespace, worker_settings: Settings, files: list[InputFile]) -> Totals:
    """Encode under a progress display."""
    with ProgressDisplay(files, "encoding", settings.log_interval) as display:
        pace = Pace(settings.workers, settings.save_seconds, display.started, display.encoded)
        return preprocess(files, settings.output_prefix, worker_settings, pace)


def show(totals: Totals, settings: argparse.Namespace, seconds: float) -> None:
    """The summary: what was written, where, and what was left out."""
    for key in settings.json_keys:
        print(f"wrote {output_prefix_of(settings.output_prefix, key)}.bin and .idx")
    ratio = totals.bytes_per_token
    print(
        f"documents {totals.num_documents:,}  tokens {totals.num_tokens:,}  bytes per token "
        f"{f'{ratio:.2f}' if ratio else 'none'}  longest document {totals.longest_tokens:,} tokens  empty documents "
        f"{totals.num_empty:,}  broken lines {totals.num_broken:,}"
    )
    print(f"{seconds:.1f} s")
    if not settings.append_eod:
        print("note: nothing marks where a document ends; with --append-eod the end-of-document token does")
    for error in totals.broken:
        print(f"left out: {error}")
    if totals.num_broken > len(totals.broken):
        print(f"left out: {totals.num_broken - len(totals.broken):,} more")


def run(arguments: list[str] | None) -> int:
    """Exit code 0: written; 1: a worker was killed; 2: an input is wrong."""
    settings, files = parse_arguments(arguments)
    worker_settings = settings_of(settings)
    if settings.partitions is not None:
        print(f"--partitions {settings.partitions} has no effect: --workers share any input, and order is kept")
    start = time.perf_counter()
    inputs = " ".join(settings.input)
    try:
        if settings.train_bpe is not None:
            train(settings, worker_settings, files)
        totals = encode(settings, worker_settings, files)
    except BrokenLineError as error:
        flag = f"--json-keys {' '.join(settings.json_keys)}" if error.missing_key else f"--input {inputs}"
        print(
            f"{flag}: {error}. Mend the line or name other keys, or give --skip-broken-lines to leave such lines "
            "out. Nothing was written.",
            file=sys.stderr,
        )
        return 2
    except NoTextError as error:
        print(f"--input {inputs}: {error}. Nothing was written.", file=sys.stderr)
        return 2
    except (InputError, GrowingFileError, OSError) as error:
        print(f"{error}. What was encoded so far is kept: the same command goes on with it.", file=sys.stderr)
        return 2
    except WorkerEndedError as error:
        print(f"{error}. What was encoded so far is kept: the same command goes on with it.", file=sys.stderr)
        return 1
    show(totals, settings, time.perf_counter() - start)
    return 0
