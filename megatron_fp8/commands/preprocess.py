"""Encodes texts into Megatron token files, one PREFIX_KEY_document.bin/.idx pair per key.

Inputs are JSON Lines, Parquet, or text files (each a document), plain, .gz, .zst, .bz2 or .xz. The bytes
written do not depend on --workers. After a kill at any time, the same command resumes. Needs no torch.
Exit codes: 0: written; 1: a worker was killed; 2: wrong input or option; 130: interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_fp8.commands.gpt2_options import GPT2_TYPE, convert_given_files, wrong_gpt2_options
from megatron_fp8.commands.progress_bars import EncodingProgress
from megatron_fp8.data.tokenizer import END_OF_DOCUMENT, HUGGING_FACE, TOKENIZER_TYPES, Tokenizer, TokenizerError
from megatron_fp8.prepare.encode import BrokenLineError, Settings, TokenizerFile, WorkerEndedError
from megatron_fp8.prepare.input_files import FORMATS, InputError, InputFile, find_inputs, skipped_inputs
from megatron_fp8.prepare.preprocess import (
    SAVE_SECONDS,
    Execution,
    NoTextError,
    Progress,
    existing_outputs,
    files_to_replace,
    output_prefix_of,
    preprocess,
)
from megatron_fp8.prepare.token_file_writer import WriterBusyError
from megatron_fp8.prepare.train_tokenizer import (
    MAX_TRAINING_BYTES,
    MIN_VOCAB_SIZE,
    train_on_files,
)

_SHOWN_SKIPPED = 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; exits with a code other than 0 as the module's docstring says."""
    options, files = parse_arguments(arguments)
    settings = _settings(options)
    if options.partitions is not None:
        print(f"--partitions {options.partitions} has no effect: --workers parallelizes any input")
    start = time.perf_counter()
    try:
        if options.train_bpe is not None:
            _train_tokenizer(options, settings, files)
        with EncodingProgress(files, "encoding", options.log_interval) as display:
            execution = Execution(options.workers, options.save_seconds, display.resumed, display.encoded)
            done = preprocess(files, options.output_prefix, settings, execution)
    except BrokenLineError as error:
        option = f"--json-keys {' '.join(options.json_keys)}" if error.missing_key else _input_option(options)
        use = "fix the line, name other keys, or skip such lines with --skip-broken-lines"
        _exit(2, f"{option}: {error}; {use}. Nothing was written.")
    except NoTextError as error:
        _exit(2, f"{_input_option(options)}: {error}. Nothing was written.")
    except (InputError, WriterBusyError, OSError) as error:
        _exit(2, f"{error}. Finished work is kept: run the same command to resume.")
    except WorkerEndedError as error:
        _exit(1, f"{error}. Finished work is kept: run the same command to resume.")
    except KeyboardInterrupt:
        _exit(130, "interrupted; run the same command to resume")
    else:
        _print_summary(done, options, time.perf_counter() - start)
        _print_inputs(files, options)


def _exit(code: int, message: str) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)


def _input_option(options: argparse.Namespace) -> str:
    return f"--input {' '.join(options.input)}"


def make_parser() -> argparse.ArgumentParser:
    """The options; those that Megatron's tool has are named as there."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # The whole list would take fourteen lines before the error message.
        usage="%(prog)s --input PATH ... --output-prefix PREFIX [--tokenizer-model FILE] [--append-eod] [OPTIONS]",
    )
    texts = parser.add_argument_group("texts")
    texts.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, folders or patterns")
    texts.add_argument(
        "--input-format",
        "--format",
        choices=FORMATS,
        default="auto",
        help="auto: by suffix; others are skipped in folders and patterns, and refused if named",
    )
    texts.add_argument("--json-keys", nargs="+", default=["text"], help="keys or columns to encode (default: text)")
    texts.add_argument(
        "--skip-broken-lines", action="store_true", help="skip and count broken lines instead of exiting"
    )
    tokens = parser.add_argument_group("tokenizer")
    tokens.add_argument(
        "--tokenizer-model", help="tokenizer.json, SentencePiece .model, rank file, or a folder with one"
    )
    tokens.add_argument(
        "--tokenizer-type", choices=(*TOKENIZER_TYPES, GPT2_TYPE), default="auto", help="default: detected"
    )
    tokens.add_argument("--vocab-file", metavar="JSON", help="GPT-2's vocabulary; with --merge-file")
    tokens.add_argument(
        "--merge-file",
        metavar="TXT",
        help="GPT-2's merges; converted with --vocab-file to --tokenizer-model (default: PREFIX_tokenizer.json)",
    )
    tokens.add_argument("--eod-token", help="end-of-document token (default: <|endoftext|>, or the tokenizer's EOS)")
    tokens.add_argument(
        "--tiktoken-pattern", help="for rank files: gpt2, cl100k_base, o200k_base, v1, v2 or a regular expression"
    )
    tokens.add_argument("--prepend-bos", action="store_true", help="begin each document with the tokenizer's BOS token")
    tokens.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    tokens.add_argument(
        "--train-bpe", type=int, metavar="VOCAB_SIZE", help="train a byte-level BPE and write it to --tokenizer-model"
    )
    tokens.add_argument(
        "--train-bpe-bytes", type=int, default=MAX_TRAINING_BYTES, help="text to train it on (default: 1 GiB)"
    )
    work = parser.add_argument_group("execution")
    work.add_argument("--output-prefix", required=True, help="path of the token files without _KEY_document and suffix")
    work.add_argument("--overwrite", action="store_true", help="replace existing token files")
    work.add_argument("--workers", type=int, default=1, help="encoding processes (default: 1)")
    work.add_argument("--partitions", type=int, help="accepted for Megatron's command lines; has no effect")
    work.add_argument("--log-interval", type=int, help="documents between progress lines without a terminal")
    work.add_argument(
        "--save-seconds", type=float, default=SAVE_SECONDS, help="most work to lose when killed (default: 10)"
    )
    return parser


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[InputFile]]:
    """The options and the inputs; everything wrong is reported at once, with exit code 2."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    wrong = [
        f"--{name.replace('_', '-')} {getattr(options, name)}: use at least 1"
        for name in ("workers", "partitions", "log_interval", "train_bpe_bytes")
        if getattr(options, name) is not None and getattr(options, name) < 1
    ]
    if len(set(options.json_keys)) != len(options.json_keys):
        wrong.append(f"--json-keys {' '.join(options.json_keys)}: name each key once")
    wrong += [
        f"--json-keys {key}: the key becomes part of a file name, which cannot contain /; rename it in the input"
        for key in options.json_keys
        if "/" in key
    ]
    directory = Path(options.output_prefix).parent
    if not directory.is_dir():
        wrong.append(f"--output-prefix {options.output_prefix}: no directory {directory}; create it first")
    for name in options.input:
        if Path(name).is_dir() and Path(name).resolve() in (directory / "file").resolve().parents:
            wrong.append(f"--output-prefix {options.output_prefix}: inside --input {name}, so it would be read as text")
    files: list[InputFile] = []
    try:
        files = find_inputs(options.input, options.input_format, options.json_keys)
    except (InputError, OSError) as error:
        wrong.append(f"{_input_option(options)}: {error}")
    wrong += wrong_gpt2_options(options)
    if options.vocab_file is not None and not wrong:
        # Only when nothing else is wrong, since it writes a file.
        wrong += convert_given_files(options)
    is_gpt2 = options.tokenizer_type == GPT2_TYPE or options.vocab_file is not None or options.merge_file is not None
    # Without a valid pair of GPT-2 files there is no tokenizer to check.
    wrong_tokenizer = [] if wrong and is_gpt2 else _wrong_tokenizer(options)
    if not (wrong or wrong_tokenizer or options.overwrite):
        wrong += _wrong_output(options, files)
    wrong += wrong_tokenizer
    if wrong:
        parser.error("\n".join(wrong))
    return options, files


def _wrong_output(options: argparse.Namespace, files: list[InputFile]) -> list[str]:
    """Existing token files that would be replaced."""
    if options.train_bpe is not None and not Path(options.tokenizer_model).exists():
        # Killed work cannot have had this tokenizer.
        found = existing_outputs(options.output_prefix, options.json_keys)
    else:
        found = files_to_replace(files, options.output_prefix, _settings(options))
    names = ", ".join(map(str, found))
    return (
        [f"--output-prefix {options.output_prefix}: {names} exist; use another prefix or --overwrite"] if found else []
    )


def _wrong_tokenizer(options: argparse.Namespace) -> list[str]:
    path = options.tokenizer_model
    if options.train_bpe is not None:
        if options.train_bpe < MIN_VOCAB_SIZE:
            return [f"--train-bpe {options.train_bpe}: too small for 256 bytes and <|endoftext|>; use at least 257"]
        if path is None or Path(path).is_dir() or not Path(path).parent.is_dir():
            return [
                f"--tokenizer-model {path}: name a file to write the trained tokenizer to, in an existing directory"
            ]
        if options.tokenizer_type not in ("auto", HUGGING_FACE):
            return [f"--tokenizer-type {options.tokenizer_type}: --train-bpe makes a {HUGGING_FACE}"]
        if options.eod_token not in (None, END_OF_DOCUMENT):
            return [f"--eod-token {options.eod_token}: --train-bpe uses {END_OF_DOCUMENT}; omit it"]
        if options.prepend_bos:
            return ["--prepend-bos: a tokenizer of --train-bpe has no token that begins texts; omit it"]
        if not Path(path).exists():
            return []
    try:
        tokenizer = _settings(options).tokenizer.load()
    except TokenizerError as error:
        return [error.as_option(getattr(options, error.key))]
    if options.prepend_bos and tokenizer.bos_id is None:
        return [
            "--prepend-bos: the tokenizer names no token that begins texts (a template in tokenizer.json, bos_token in "
            "tokenizer_config.json, BOS of a SentencePiece model); add one there, or omit the option"
        ]
    if options.train_bpe is not None and tokenizer.vocab_size > options.train_bpe:
        return [
            f"--tokenizer-model {path}: exists and has {tokenizer.vocab_size} tokens, more than --train-bpe "
            f"{options.train_bpe}; name another file, or omit --train-bpe to use this one"
        ]
    return []


def _settings(options: argparse.Namespace) -> Settings:
    file = TokenizerFile(options.tokenizer_model, options.tokenizer_type, options.eod_token, options.tiktoken_pattern)
    return Settings(file, tuple(options.json_keys), options.append_eod, options.skip_broken_lines, options.prepend_bos)


def _train_tokenizer(options: argparse.Namespace, settings: Settings, files: list[InputFile]) -> None:
    """Train the tokenizer, unless a killed run has done so."""
    path = Path(options.tokenizer_model)
    if path.exists():
        print(f"{path} exists ({Tokenizer.load(path).vocab_size:,} tokens): used, not trained again")
        return
    with EncodingProgress(files, "reading", options.log_interval) as display:
        tokenizer = train_on_files(files, settings, options.train_bpe, path, options.train_bpe_bytes, display.passed)
    fewer = tokenizer.vocab_size < options.train_bpe
    why = f"; the texts have too few pairs to merge for --train-bpe {options.train_bpe:,}" if fewer else ""
    print(f"wrote {path}: {tokenizer.vocab_size:,} tokens{why}")


def _print_inputs(files: list[InputFile], options: argparse.Namespace) -> None:
    """What was read as what, and what was not read."""
    counts = Counter(file.format for file in files)
    print("files read as " + ", ".join(f"{kind}: {count:,}" for kind, count in sorted(counts.items())))
    skipped = skipped_inputs(options.input, options.input_format)
    for path in skipped[:_SHOWN_SKIPPED]:
        print(f"skipped: {path}: no known suffix; --input-format says what such files hold")
    if len(skipped) > _SHOWN_SKIPPED:
        print(f"skipped: {len(skipped) - _SHOWN_SKIPPED:,} more files without a known suffix")


def _print_summary(done: Progress, options: argparse.Namespace, seconds: float) -> None:
    for key in options.json_keys:
        print(f"wrote {output_prefix_of(options.output_prefix, key)}.bin and .idx")
    states = done.by_key.values()
    print(
        f"documents {done.num_documents:,}  tokens {done.num_tokens:,}  bytes per token "
        f"{done.text_bytes / done.num_tokens:.2f}  longest document {max(s.longest_tokens for s in states):,} tokens  "
        f"empty documents {sum(s.num_empty for s in states):,}  broken lines {done.num_broken:,}"
    )
    tokenizer = _settings(options).tokenizer.load()
    begins = f"begin with id {tokenizer.bos_id} (BOS)" if options.prepend_bos else "begin without BOS"
    ends = f"end with id {tokenizer.eod_id} (end of document)" if options.append_eod else "do not end with a token"
    print(f"documents {begins} and {ends}")
    print(f"{seconds:.1f} s")
    if tokenizer.adds_bos and not options.prepend_bos:
        print(
            f"warning: this tokenizer puts id {tokenizer.bos_id} (BOS) before every text, and these documents lack it: "
            "a model that was trained with it expects --prepend-bos"
        )
    if not options.append_eod:
        print("warning: documents are not separated; --append-eod ends each with the end-of-document token")
    for error in done.broken:
        print(f"skipped: {error}")
    if done.num_broken > len(done.broken):
        print(f"skipped: {done.num_broken - len(done.broken):,} more")
