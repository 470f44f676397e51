"""Generates text with the model of a checkpoint.

CHECKPOINT is a run directory, its checkpoints, or one of them, saved under any layout and format. Without a prompt the
text starts like a document. Runs on CPUs and GPUs; under torchrun all processes share the model (tensor parallel). FP8
uses the checkpoint's scales. A text ends at an end-of-document token, after --max-new-tokens, or at the model's last
position. Exit codes: 0: done; 2: wrong input.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fp8.checkpoint.saved_model import InferenceSettings, SavedModel, kept_checkpoint, read_saved_model
from megatron_fp8.commands.model_options import add_format_options, exit_on_bad_input, non_negative, positive
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.errors import BadInputError
from megatron_fp8.evaluate.files import model_tokenizer

if TYPE_CHECKING:
    from megatron_fp8.generate.generation import Continuation
    from megatron_fp8.generate.loaded_model import LoadedModel

# An incomplete character decodes to this.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="run directory, or one of its checkpoints")
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="text to continue; several form a batch")
    parser.add_argument("--prompts-file", metavar="FILE", help="more prompts, one per line; -: from standard input")
    parser.add_argument("--iteration", type=non_negative, metavar="N", help="iteration to use (default: the latest)")
    parser.add_argument("--max-new-tokens", type=positive, default=100, metavar="N", help="(default: 100)")
    how = parser.add_argument_group("sampling")
    how.add_argument("--greedy", action="store_true", help="always take the most likely token")
    temperature = _number(float, 0.0)
    how.add_argument("--temperature", type=temperature, default=1.0, metavar="T", help="0: greedy (default: 1.0)")
    how.add_argument(
        "--top-k", type=_number(int, 0), default=0, metavar="K", help="keep the K most likely (default: all)"
    )
    how.add_argument(
        "--top-p",
        type=_number(float, 0.0, 1.0),
        default=1.0,
        metavar="P",
        help="nucleus sampling: smallest token set with cumulative probability >= P (default: 1, all)",
    )
    seed = _number(int, 0, 2**63 - 1)
    how.add_argument("--seed", type=seed, default=1234, metavar="N", help="same seed, same text (default: 1234)")
    model = parser.add_argument_group("model")
    add_format_options(model)
    model.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer file (default: the run's)")
    model.add_argument("--batch-size", type=positive, default=16, metavar="N", help="prompts per batch (default: 16)")
    model.add_argument("--no-cache", action="store_true", help="recompute the whole text for every token (slow)")
    parser.add_argument("--json", action="store_true", help="print a JSON object per prompt, one per line")
    return parser


@dataclass(frozen=True)
class _Job:
    """The validated input: the model, and prompts as text and as tokens."""

    saved: SavedModel
    tokenizer: Tokenizer
    prompts: list[str]
    tokens: list[list[int]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit codes as above."""
    s = make_parser().parse_intermixed_args(arguments)
    # They import torch, which --help does without.
    from megatron_fp8.faults.failure_report import run_reporting
    from megatron_fp8.parallel.process_group import global_rank, world_size

    with ExitStack() as kept:
        with exit_on_bad_input():
            checkpoint = kept.enter_context(kept_checkpoint(s.checkpoint, s.iteration))
            wanted = InferenceSettings(world_size(), mode=s.precision, fp8_recipe=s.fp8_recipe)
            job = _prepare(checkpoint, wanted, s.tokenizer, s.prompts, s.prompts_file)
        run_reporting(lambda: _run(job, s), global_rank())


def _prepare(
    checkpoint: Path, wanted: InferenceSettings, tokenizer_file: Path | None, given: list[str], file: str | None
) -> _Job:
    """Validate all input; raises BadInputError or CheckpointError."""
    num_processes = wanted.tensor_model_parallel_size
    saved = read_saved_model(checkpoint, wanted, num_processes)
    tokenizer = model_tokenizer(saved, tokenizer_file)
    if file == "-" and num_processes > 1:
        raise BadInputError("--prompts-file -: only one of several processes has standard input\n    use: a file")
    prompts = [*given, *_prompts_of(file)] or [""]
    broken = [number for number, prompt in enumerate(prompts, 1) if not _is_unicode(prompt)]
    if broken:
        raise BadInputError(f"prompt {broken[0]} is not valid Unicode\n    use: text in UTF-8")
    tokens = [prompt_tokens(tokenizer, prompt) for prompt in prompts]
    most = saved.num_positions
    long = [f"prompt {index + 1} has {len(row)} tokens" for index, row in enumerate(tokens) if len(row) >= most]
    if long:
        raise BadInputError(f"{'; '.join(long)}\n    use: at most {most - 1}: the model has {most} positions")
    return _Job(saved, tokenizer, prompts, tokens)


def _prompts_of(file: str | None) -> list[str]:
    """The non-blank lines of a file or of standard input."""
    if file is None:
        return []
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{file} cannot be read: {error}\n    use: a text file, one prompt per line") from error
    # Not `splitlines`, which also splits at characters that may be part of a text.
    return [line for line in text.split("\n") if line.strip()]


def _is_unicode(text: str) -> bool:
    """False if the command line or standard input was not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A prompt's tokens; for an empty one the end-of-document token, which precedes a document."""
    return tokenizer.encode(prompt) or [tokenizer.eod_id]


class TextStream:
    """Decodes a sample's new tokens as they arrive."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._before = tokenizer.decode(self._tokens)
        self._shown = 0
        self.text = ""

    def add(self, token: int) -> str:
        """The new text that is final; empty within a character."""
        self._tokens.append(token)
        # Decoded together with the prompt: some tokenizers drop a leading space.
        self.text = self._tokenizer.decode(self._tokens).removeprefix(self._before)
        return "" if self.text.endswith(_INCOMPLETE) else self.rest()

    def rest(self) -> str:
        """The text not returned yet, incomplete characters included."""
        piece = self.text[self._shown :]
        self._shown = len(self.text)
        return piece


def _run(job: _Job, options: argparse.Namespace) -> None:
    from megatron_fp8.generate.loaded_model import open_model

    with open_model(job.saved) as model:
        writes = model.groups.rank == 0
        for note in model.notes if writes else ():
            print(f"note: {note}", file=sys.stderr)
        _generate(job, model, options, writes)


def _generate(job: _Job, model: LoadedModel, options: argparse.Namespace, writes: bool) -> None:
    from megatron_fp8.generate.generation import Limits, Sampling, generate

    limits = Limits(options.max_new_tokens, job.tokenizer.eod_id)
    sampling = Sampling(options.greedy, options.temperature, options.top_k, options.top_p)
    live = writes and len(job.prompts) == 1 and not options.json and sys.stdout.isatty()
    if live:
        _show(job.prompts[0])
    started, num_tokens = time.monotonic(), 0
    for first in range(0, len(job.prompts), options.batch_size):
        prompts = job.tokens[first : first + options.batch_size]
        streams = [TextStream(job.tokenizer, tokens) for tokens in prompts]

        def on_token(index: int, token: int, streams: Sequence[TextStream] = streams) -> None:
            piece = streams[index].add(token)
            if live:
                _show(piece)

        done = generate(model, prompts, limits, sampling, options.seed + first, on_token, not options.no_cache)
        num_tokens += sum(len(continuation.tokens) for continuation in done)
        if live:
            _show(streams[0].rest() + "\n")
        elif writes:
            for line in _lines(job, streams, done, first, options.json):
                print(line, flush=True)
    if writes:
        seconds = time.monotonic() - started
        print(f"{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s", file=sys.stderr)


def _lines(
    job: _Job, streams: Sequence[TextStream], done: Sequence[Continuation], first: int, as_json: bool
) -> Iterator[str]:
    for number, (stream, continuation) in enumerate(zip(streams, done, strict=True), first):
        prompt = job.prompts[number]
        if as_json:
            record: dict[str, Any] = {"prompt": prompt, "text": stream.text, "ending": continuation.ending}
            yield json.dumps({**record, "tokens": continuation.tokens}, ensure_ascii=False)
            continue
        if len(job.prompts) > 1:
            yield f"--- {number + 1} of {len(job.prompts)} ({continuation.ending})"
        yield prompt + stream.text


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _number(kind: Callable[[str], float], least: float, most: float = float("inf")) -> Callable[[str], float]:
    def read(text: str) -> float:
        value: float | None
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            limits = f"from {least}" + ("" if most == float("inf") else f" to {most}")
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {limits}")
        return value

    return read
