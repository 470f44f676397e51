"""Owns the command line of tools/data.py: its options, and what a person is shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from megatron_fp8.config.load import load_config
from megatron_fp8.data.blend import Blend, BlendError, parse_split
from megatron_fp8.data.bytes_bar import bytes_bar
from megatron_fp8.data.inspect import check_token_file
from megatron_fp8.data.look import (
    SHARES,
    Numbers,
    Piece,
    PlaceError,
    document_piece,
    numbers_of,
    position_piece,
    sample_pieces,
)
from megatron_fp8.data.rearrange import Share, divide, merge
from megatron_fp8.data.splits import DataKeyError, train_blend
from megatron_fp8.data.token_file import TokenIndex, bin_path, idx_path, read_index
from megatron_fp8.data.tokenizer import TOKENIZER_TYPES, Tokenizer, TokenizerError
from megatron_fp8.errors import BadInputError

USAGE = """Looks at Megatron token files, checks them, joins and divides them. PREFIX: a file's path less .bin and .idx.

    python tools/data.py inspect PREFIX ...                 documents, tokens, lengths, sizes
    python tools/data.py sample PREFIX --document 12        the tokens at a place, and their text
    python tools/data.py sample CONFIG --sample 5000        what a run trains on
    python tools/data.py verify PREFIX ... --tokenizer-model FILE
    python tools/data.py merge PREFIX PREFIX ... --output-prefix OUT
    python tools/data.py split PREFIX --output-prefix OUT --split 969,30,1

Needs no torch. Exit codes: 0: done, whole; 1: verify found a damaged file; 2: a wrong path or option; 130: interrupted.
"""
NO_LIMIT = 2**63 - 1
PARTS = ("train", "valid", "test")
BAR_WIDTH = 40


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    command = add("inspect", _inspect, "Say what token files hold, by their indices alone.")
    command.add_argument("prefixes", nargs="+", metavar="PREFIX")

    command = add("sample", _sample, "Show the tokens at a place of a token file, or those of a run's sample.")
    command.add_argument("what", metavar="PREFIX or CONFIG", help="a token file; with --sample a run's config")
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="with --sample: of the config")
    place = command.add_mutually_exclusive_group(required=True)
    place.add_argument("--document", type=int, metavar="N", help="document N of the file, from 0 on")
    place.add_argument("--position", type=int, metavar="N", help="token N of the file, from 0 on")
    place.add_argument("--sample", type=int, metavar="N", help="sample N of the config's training, from 0 on")
    command.add_argument("--token", type=int, default=0, metavar="N", help="with --document: begin at its token N")
    command.add_argument("--length", type=int, default=64, metavar="N", help="at most N tokens of a document (64)")
    _add_tokenizer(command)

    command = add("verify", _verify, "Read token files whole: index against data, ids against the vocabulary.")
    command.add_argument("prefixes", nargs="+", metavar="PREFIX")
    command.add_argument("--vocab-size", type=int, metavar="N", help="ids have to be below N")
    _add_tokenizer(command)

    command = add("merge", _merge, "Join token files to one, in the order given.")
    command.add_argument("prefixes", nargs="+", metavar="PREFIX")
    _add_output(command)

    command = add(
        "split", _split, "Divide a token file's documents, in their order, into OUT_train, OUT_valid, OUT_test."
    )
    command.add_argument("prefix", metavar="PREFIX")
    shares = command.add_mutually_exclusive_group(required=True)
    shares.add_argument("--split", metavar="A,B,C", help="by shares, as data.split does: 969,30,1")
    shares.add_argument("--documents", metavar="A,B,C", help="so many documents each; what is left is left out")
    _add_output(command)
    return parser


def _add_tokenizer(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tokenizer-model", metavar="PATH", help="the tokenizer that made the file")
    command.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="its kind, where its file does not tell")
    command.add_argument("--tiktoken-pattern", metavar="NAME", help="of ranks: as in preprocess_data.py")
    command.add_argument("--eod-token", metavar="NAME", help="what ends documents, where it is another")


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output-prefix", required=True, metavar="OUT")
    command.add_argument("--overwrite", action="store_true", help="replace files that exist")


def run(arguments: list[str] | None) -> int:
    """Exit codes as in `USAGE`."""
    parser = make_parser()
    settings, rest = parser.parse_known_args(arguments)
    # Behind options argparse takes no more of a list.
    if rest and (settings.command != "sample" or any(text.startswith("-") or "=" not in text for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        settings.overrides += rest
    try:
        code: int = settings.run(settings)
    except (BadInputError, DataKeyError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{settings.command}: {error}", file=sys.stderr)
        return 2
    return code


def _inspect(settings: argparse.Namespace) -> int:
    wrong: list[str] = []
    for number, prefix in enumerate(settings.prefixes):
        try:
            numbers = numbers_of(prefix)
        except BadInputError as error:
            wrong.append(str(error))
            continue
        if number > len(wrong):
            print()
        _print_numbers(prefix, numbers)
    if wrong:
        raise PlaceError("\n".join(wrong))
    return 0


def _print_numbers(prefix: str, numbers: Numbers) -> None:
    sequences = ""
    if numbers.num_sequences != numbers.num_documents:
        sequences = f" of {numbers.num_sequences:,} sequences, which training takes for documents"
    print(prefix)
    print(f"  documents  {numbers.num_documents:,}{sequences}, {numbers.num_empty:,} of them empty")
    print(f"  tokens     {numbers.num_tokens:,} of {numbers.dtype}")
    print(f"  sizes      .bin {numbers.bin_bytes:,} bytes, .idx {numbers.idx_bytes:,} bytes")
    shown = ", ".join(f"{share:.0%} {value:,}" for share, value in zip(SHARES, numbers.quantiles, strict=True))
    print(
        f"  lengths    mean {numbers.mean:,.1f}; {shown}; longest {numbers.longest:,} (document "
        f"{numbers.longest_document})"
    )
    most = max((count for _, _, count in numbers.histogram), default=1)
    for shortest, longest, count in numbers.histogram:
        bar = "#" * max(round(BAR_WIDTH * count / most), 1)
        print(f"  {f'{shortest:,} to {longest:,}':>25}  {bar} {count:,}")


def _sample(settings: argparse.Namespace) -> int:
    tokenizer = _tokenizer(settings)
    if settings.sample is not None:
        config = load_config(settings.what, settings.overrides).config
        if tokenizer is None and config.data.tokenizer_model is not None:
            tokenizer = Tokenizer.of(config.data)
        blend = train_blend(config.data)
        try:
            pieces = sample_pieces(blend, config.model.seq_length, config.training.seed, settings.sample)
        except MemoryError as error:
            raise PlaceError(f"--sample {settings.sample}: the order up to there does not fit in memory") from error
        print(f"sample {settings.sample}, in step {settings.sample // config.training.global_batch_size + 1}:")
    elif settings.overrides:
        raise PlaceError(f"{settings.overrides[0]} changes a config, which belongs to --sample")
    elif settings.length < 1:
        raise PlaceError(f"--length {settings.length} is below 1")
    elif settings.document is not None:
        pieces = [document_piece(settings.what, settings.document, settings.token, settings.length)]
    else:
        pieces = [position_piece(settings.what, settings.position, settings.length)]
    for piece in pieces:
        _print_piece(piece, tokenizer)
    return 0


def _print_piece(piece: Piece, tokenizer: Tokenizer | None) -> None:
    size = int(read_index(piece.prefix).lengths_tokens[piece.document])
    end = piece.first + len(piece.tokens) - 1
    print(f"{piece.prefix}: document {piece.document}, tokens {piece.first:,} to {end:,} of {size:,}")
    print(f"  ids   {' '.join(map(str, piece.tokens.tolist()))}")
    if tokenizer is None:
        return
    foreign = [token for token in piece.tokens.tolist() if not 0 <= token < tokenizer.vocab_size]
    if foreign:
        print(f"  text  none: token id {foreign[0]} is not in the vocabulary of {tokenizer.vocab_size} tokens")
    else:
        print(f"  text  {tokenizer.decode(piece.tokens.tolist())!r}")


def _verify(settings: argparse.Namespace) -> int:
    tokenizer = _tokenizer(settings)
    limit = settings.vocab_size
    if limit is None:
        limit = tokenizer.vocab_size if tokenizer is not None else NO_LIMIT
    elif limit < 1:
        raise PlaceError(f"--vocab-size {limit} is below 1")
    missing = [
        prefix for prefix in settings.prefixes if not any(path(prefix).exists() for path in (bin_path, idx_path))
    ]
    if missing:
        lines = [f"{prefix}: there is neither {bin_path(prefix)} nor {idx_path(prefix)}" for prefix in missing]
        raise PlaceError("\n".join(lines))
    damaged = False
    for prefix in settings.prefixes:
        size = bin_path(prefix).stat().st_size if bin_path(prefix).is_file() else 0
        with bytes_bar(prefix, size) as on_bytes:
            problems = check_token_file(prefix, limit, "PREFIX", read_all=True, on_bytes=on_bytes)
        if problems:
            damaged = True
            print(f"{prefix}: damaged: {problems[0].reason}; {problems[0].use_instead}")
            continue
        index = read_index(prefix)
        ids = f"every id is below {limit}" if limit != NO_LIMIT else "no id is negative (--tokenizer-model says more)"
        print(f"{prefix}: whole: {len(index.lengths_tokens):,} documents, {index.num_tokens:,} tokens, {ids}")
    return 1 if damaged else 0


def _merge(settings: argparse.Namespace) -> int:
    total = sum(bin_path(prefix).stat().st_size for prefix in settings.prefixes if bin_path(prefix).is_file())
    with bytes_bar(settings.output_prefix, total) as on_bytes:
        index = merge(settings.prefixes, settings.output_prefix, settings.overwrite, on_bytes)
    dtypes = {prefix: read_index(prefix).dtype for prefix in settings.prefixes}
    widened = [prefix for prefix, dtype in dtypes.items() if dtype != index.dtype]
    if widened:
        print(f"widened to {index.dtype.name}: {', '.join(widened)}")
    _print_written(settings.output_prefix, index)
    return 0


def _split(settings: argparse.Namespace) -> int:
    total = len(read_index(settings.prefix).lengths_tokens)
    ranges = _by_numbers(settings.documents, total) if settings.documents else _by_shares(settings.split, total)
    shares = [Share(f"{settings.output_prefix}_{name}", documents) for name, documents in ranges]
    size = bin_path(settings.prefix).stat().st_size if bin_path(settings.prefix).is_file() else 0
    with bytes_bar(settings.prefix, size) as on_bytes:
        indices = divide(settings.prefix, shares, settings.overwrite, on_bytes)
    for share, index in zip(shares, indices, strict=True):
        _print_written(share.prefix, index)
    left = total - sum(len(share.documents) for share in shares)
    if left:
        print(f"left out: {left:,} documents")
    return 0


def _by_shares(text: str, total: int) -> list[tuple[str, range]]:
    """The documents of every share above 0."""
    try:
        shares = parse_split(text)
    except BlendError as error:
        raise PlaceError(f"--split {text}: {error}") from error
    # Which documents a share of a file means is the blend's matter, so that the same numbers in a config agree.
    return [
        (name, Blend(("",), None, share).documents(total))
        for name, share in zip(PARTS, shares, strict=True)
        if share[1] > share[0]
    ]


def _by_numbers(text: str, total: int) -> list[tuple[str, range]]:
    """The documents of every number above 0."""
    parts = text.split(",")
    numbers = [int(part) for part in parts if part.strip().isdecimal()]
    if not len(numbers) == len(parts) <= len(PARTS) or sum(numbers) == 0:
        raise PlaceError(f"--documents {text}: it is not one to three numbers; use 9000,500,500")
    if sum(numbers) > total:
        raise PlaceError(f"--documents {text}: that is {sum(numbers):,} documents, and the file has {total:,}")
    ranges, begin = [], 0
    for name, number in zip(PARTS, numbers, strict=False):
        if number:
            ranges.append((name, range(begin, begin + number)))
        begin += number
    return ranges


def _print_written(prefix: str, index: TokenIndex) -> None:
    print(
        f"wrote {prefix}.bin and .idx: {len(index.lengths_tokens):,} documents, {index.num_tokens:,} tokens of "
        f"{index.dtype.name}"
    )


def _tokenizer(settings: argparse.Namespace) -> Tokenizer | None:
    if settings.tokenizer_model is None and settings.tokenizer_type is None:
        return None
    kind = settings.tokenizer_type or "auto"
    try:
        return Tokenizer.load(settings.tokenizer_model, kind, settings.eod_token, settings.tiktoken_pattern)
    except TokenizerError as error:
        raise PlaceError(error.as_option(getattr(settings, error.key))) from error
