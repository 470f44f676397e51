"""Inspects, validates, merges and splits Megatron token files.

PREFIX is a token file's path without .bin or .idx. Needs no torch.
Exit codes: 0: done, valid; 1: verify found a corrupt file; 2: wrong path or option; 130: interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from megatron_fp8.commands.progress_bars import bytes_bar
from megatron_fp8.config.load import load_config
from megatron_fp8.data.blend import Blend, BlendError, DataKeyError, parse_split, train_blend
from megatron_fp8.data.check_data import check_token_file
from megatron_fp8.data.token_file import TokenIndex, bin_path, idx_path, read_index
from megatron_fp8.data.tokenizer import TOKENIZER_TYPES, Tokenizer, TokenizerError
from megatron_fp8.errors import BadInputError
from megatron_fp8.prepare.inspect_tokens import (
    QUANTILES,
    Piece,
    document_piece,
    position_piece,
    sample_pieces,
    statistics_of,
)
from megatron_fp8.prepare.merge_split import Share, merge, split

_PARTS = ("train", "valid", "test")
_BAR_WIDTH = 40
_EXAMPLES = """examples:
  %(prog)s inspect PREFIX ...                 documents, tokens, lengths, sizes
  %(prog)s sample PREFIX --document 12        the tokens at a position, and their text
  %(prog)s sample CONFIG --sample 5000        what a run trains on
  %(prog)s verify PREFIX ... --tokenizer-model FILE
  %(prog)s merge PREFIX PREFIX ... --output-prefix OUT
  %(prog)s split PREFIX --output-prefix OUT --split 969,30,1
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; exits with a code other than 0 as the module's docstring says."""
    parser = make_parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse does not continue a list of arguments after options.
    if rest and (options.command != "sample" or any(text.startswith("-") or "=" not in text for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    try:
        code: int = options.run(options)
    except (BadInputError, DataKeyError) as error:
        print(error, file=sys.stderr)
        code = 2
    except OSError as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    if code:
        sys.exit(code)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLES, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    command = add("inspect", _inspect, "Print statistics of token files, from their indices alone.")
    command.add_argument("prefixes", nargs="+", metavar="PREFIX")

    command = add("sample", _sample, "Print the tokens at a position of a token file, or those of a run's sample.")
    command.add_argument("what", metavar="PREFIX or CONFIG", help="a token file; with --sample a run's config")
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="with --sample: config overrides")
    place = command.add_mutually_exclusive_group(required=True)
    place.add_argument("--document", type=int, metavar="N", help="document N of the file, from 0")
    place.add_argument("--position", type=int, metavar="N", help="token N of the file, from 0")
    place.add_argument("--sample", type=int, metavar="N", help="training sample N of the config, from 0")
    command.add_argument("--token", type=int, default=0, metavar="N", help="with --document: start at its token N")
    command.add_argument("--length", type=int, default=64, metavar="N", help="at most N tokens of a document (64)")
    _add_tokenizer(command)

    command = add("verify", _verify, "Read token files completely: index against data, ids against the vocabulary.")
    command.add_argument("prefixes", nargs="+", metavar="PREFIX")
    command.add_argument("--vocab-size", type=int, metavar="N", help="ids must be below N")
    _add_tokenizer(command)

    command = add("merge", _merge, "Merge token files into one, in the order given.")
    command.add_argument("prefixes", nargs="+", metavar="PREFIX")
    _add_output(command)

    command = add("split", _split, "Split a token file's documents, in order, into OUT_train, OUT_valid, OUT_test.")
    command.add_argument("prefix", metavar="PREFIX")
    shares = command.add_mutually_exclusive_group(required=True)
    shares.add_argument("--split", metavar="A,B,C", help="by shares, like data.split: 969,30,1")
    shares.add_argument("--documents", metavar="A,B,C", help="by numbers of documents; the rest is left out")
    _add_output(command)
    return parser


def _add_tokenizer(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tokenizer-model", metavar="PATH", help="the tokenizer that made the file")
    command.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="default: detected from the file")
    command.add_argument("--tiktoken-pattern", metavar="NAME", help="for rank files, as in preprocess_data.py")
    command.add_argument("--eod-token", metavar="NAME", help="the end-of-document token, if not the default")


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output-prefix", required=True, metavar="OUT")
    command.add_argument("--overwrite", action="store_true", help="replace existing files")


def _inspect(options: argparse.Namespace) -> int:
    errors: list[str] = []
    for number, prefix in enumerate(options.prefixes):
        try:
            found = statistics_of(prefix)
        except BadInputError as error:
            errors.append(str(error))
            continue
        if number > len(errors):
            print()
        sequences = ""
        if found.num_sequences != found.num_documents:
            sequences = f" of {found.num_sequences:,} sequences, each of which training takes for a document"
        print(prefix)
        print(f"  documents  {found.num_documents:,}{sequences}, {found.num_empty:,} of them empty")
        print(f"  tokens     {found.num_tokens:,} of {found.dtype}")
        print(f"  sizes      .bin {found.bin_bytes:,} bytes, .idx {found.idx_bytes:,} bytes")
        shown = ", ".join(f"{share:.0%} {value:,}" for share, value in zip(QUANTILES, found.quantiles, strict=True))
        print(
            f"  lengths    mean {found.mean:,.1f}; {shown}; longest {found.longest:,} (document "
            f"{found.longest_document})"
        )
        highest = max((count for _, _, count in found.histogram), default=1)
        for shortest, longest, count in found.histogram:
            bar = "#" * max(round(_BAR_WIDTH * count / highest), 1)
            print(f"  {f'{shortest:,} to {longest:,}':>25}  {bar} {count:,}")
    if errors:
        raise BadInputError("\n".join(errors))
    return 0


def _sample(options: argparse.Namespace) -> int:
    tokenizer = _tokenizer(options)
    if options.sample is not None:
        config = load_config(options.what, options.overrides).config
        if tokenizer is None and config.data.tokenizer_model is not None:
            tokenizer = Tokenizer.of(config.data)
        blend = train_blend(config.data)
        try:
            pieces = sample_pieces(blend, config.model.seq_length, config.training.seed, options.sample)
        except MemoryError as error:
            raise BadInputError(f"--sample {options.sample}: the order up to there does not fit in memory") from error
        print(f"sample {options.sample}, in step {options.sample // config.training.global_batch_size + 1}:")
    elif options.overrides:
        raise BadInputError(f"{options.overrides[0]}: overrides need --sample")
    elif options.length < 1:
        raise BadInputError(f"--length {options.length}: use at least 1")
    elif options.document is not None:
        pieces = [document_piece(options.what, options.document, options.token, options.length)]
    else:
        pieces = [position_piece(options.what, options.position, options.length)]
    for piece in pieces:
        _print_piece(piece, tokenizer)
    return 0


def _print_piece(piece: Piece, tokenizer: Tokenizer | None) -> None:
    size = int(read_index(piece.prefix).lengths_tokens[piece.document])
    ids = piece.tokens.tolist()
    last = piece.first + len(ids) - 1
    print(f"{piece.prefix}: document {piece.document}, tokens {piece.first:,} to {last:,} of {size:,}")
    print(f"  ids   {' '.join(map(str, ids))}")
    if tokenizer is None:
        return
    foreign = [token for token in ids if not 0 <= token < tokenizer.vocab_size]
    if foreign:
        print(f"  text  none: token id {foreign[0]} is outside the vocabulary of {tokenizer.vocab_size} tokens")
    else:
        print(f"  text  {tokenizer.decode(ids)!r}")


def _verify(options: argparse.Namespace) -> int:
    tokenizer = _tokenizer(options)
    vocab_size = options.vocab_size
    if vocab_size is None:
        vocab_size = tokenizer.vocab_size if tokenizer is not None else None
    elif vocab_size < 1:
        raise BadInputError(f"--vocab-size {vocab_size}: use at least 1")
    missing = [prefix for prefix in options.prefixes if not any(path(prefix).exists() for path in (bin_path, idx_path))]
    if missing:
        lines = [f"{prefix}: neither {bin_path(prefix)} nor {idx_path(prefix)} exists" for prefix in missing]
        raise BadInputError("\n".join(lines))
    any_corrupt = False
    for prefix in options.prefixes:
        with bytes_bar(prefix, _bin_bytes(prefix)) as on_bytes:
            problems = check_token_file(prefix, vocab_size, "PREFIX", read_all=True, on_bytes=on_bytes)
        if problems:
            any_corrupt = True
            print(f"{prefix}: corrupt: {problems[0].reason}; {problems[0].use_instead}")
            continue
        index = read_index(prefix)
        ids = f"all ids are below {vocab_size}"
        if vocab_size is None:
            ids = "no id is negative (give --tokenizer-model to check them against a vocabulary)"
        print(f"{prefix}: valid: {len(index.lengths_tokens):,} documents, {index.num_tokens:,} tokens, {ids}")
    return 1 if any_corrupt else 0


def _merge(options: argparse.Namespace) -> int:
    with bytes_bar(options.output_prefix, sum(map(_bin_bytes, options.prefixes))) as on_bytes:
        index = merge(options.prefixes, options.output_prefix, options.overwrite, on_bytes)
    widened = [prefix for prefix in options.prefixes if read_index(prefix).dtype != index.dtype]
    if widened:
        print(f"widened to {index.dtype.name}: {', '.join(widened)}")
    _print_written(options.output_prefix, index)
    return 0


def _split(options: argparse.Namespace) -> int:
    total = len(read_index(options.prefix).lengths_tokens)
    ranges = _by_numbers(options.documents, total) if options.documents else _by_shares(options.split, total)
    shares = [Share(f"{options.output_prefix}_{name}", documents) for name, documents in ranges]
    with bytes_bar(options.prefix, _bin_bytes(options.prefix)) as on_bytes:
        indices = split(options.prefix, shares, options.overwrite, on_bytes)
    for share, index in zip(shares, indices, strict=True):
        _print_written(share.prefix, index)
    left = total - sum(len(share.documents) for share in shares)
    if left:
        print(f"left out: {left:,} documents")
    return 0


def _by_shares(text: str, total: int) -> list[tuple[str, range]]:
    """The documents of each share above 0, the same as `data.split` gives."""
    try:
        shares = parse_split(text)
    except BlendError as error:
        raise BadInputError(f"--split {text}: {error}") from error
    return [
        (name, Blend(("",), None, share).documents(total))
        for name, share in zip(_PARTS, shares, strict=True)
        if share[1] > share[0]
    ]


def _by_numbers(text: str, total: int) -> list[tuple[str, range]]:
    """The documents of each number above 0."""
    parts = text.split(",")
    numbers = [int(part) for part in parts if part.strip().isdecimal()]
    if not len(numbers) == len(parts) <= len(_PARTS) or sum(numbers) == 0:
        raise BadInputError(f"--documents {text}: not one to three numbers; use 9000,500,500")
    if sum(numbers) > total:
        raise BadInputError(f"--documents {text}: that is {sum(numbers):,} documents, but the file has {total:,}")
    ranges, begin = [], 0
    for name, number in zip(_PARTS, numbers, strict=False):
        if number:
            ranges.append((name, range(begin, begin + number)))
        begin += number
    return ranges


def _print_written(prefix: str, index: TokenIndex) -> None:
    print(
        f"wrote {prefix}.bin and .idx: {len(index.lengths_tokens):,} documents, {index.num_tokens:,} tokens of "
        f"{index.dtype.name}"
    )


def _bin_bytes(prefix: str) -> int:
    return bin_path(prefix).stat().st_size if bin_path(prefix).is_file() else 0


def _tokenizer(options: argparse.Namespace) -> Tokenizer | None:
    if options.tokenizer_model is None and options.tokenizer_type is None:
        return None
    kind = options.tokenizer_type or "auto"
    try:
        return Tokenizer.load(options.tokenizer_model, kind, options.eod_token, options.tiktoken_pattern)
    except TokenizerError as error:
        raise BadInputError(error.as_option(getattr(options, error.key))) from error
