"""Continues text with the model of a checkpoint.

CHECKPOINT is a run's directory, its checkpoints, or one of them, saved under any layout and format. Without a prompt a
text begins as a document does. Runs on CPUs and GPUs; under torchrun all processes share the model (tensor parallel).
FP8 runs with the scales that the checkpoint holds. What ends a text: the end of a document, --max-new-tokens, or the
model's last position.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fp8.checkpoint.saved_model import InferenceSettings, SavedModel, kept_checkpoint, read_saved_model
from megatron_fp8.errors import BadInputError

if TYPE_CHECKING:
    from megatron_fp8.data.tokenizer import Tokenizer
    from megatron_fp8.generate.generation import Continuation
    from megatron_fp8.generate.text import TextStream
    from megatron_fp8.train.loaded_model import LoadedModel


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="run directory, or one of its checkpoints")
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="text to continue; several go side by side")
    parser.add_argument("--prompts-file", metavar="FILE", help="one more prompt a line; -: from standard input")
    parser.add_argument("--iteration", type=int, metavar="N", help="which checkpoint of the run (default: the latest)")
    parser.add_argument("--max-new-tokens", type=_number(int, 1), default=100, metavar="N", help="(default: 100)")
    how = parser.add_argument_group("choice of tokens")
    how.add_argument("--greedy", action="store_true", help="always the most likely one")
    how.add_argument(
        "--temperature", type=_number(float, 0.0), default=1.0, metavar="T", help="0: as --greedy (default: 1.0)"
    )
    how.add_argument(
        "--top-k", type=_number(int, 0), default=0, metavar="K", help="of the K most likely (default: 0, all)"
    )
    how.add_argument(
        "--top-p",
        type=_number(float, 0.0, 1.0),
        default=1.0,
        metavar="P",
        help="of those that make up P of the chance (default: 1)",
    )
    seed = _number(int, 0, 2**63 - 1)
    how.add_argument("--seed", type=seed, default=1234, metavar="N", help="the same N, the same text (default: 1234)")
    model = parser.add_argument_group("model")
    model.add_argument(
        "--precision", choices=("fp32", "fp16", "bf16", "fp8"), help="number format (default: as in training)"
    )
    model.add_argument(
        "--fp8-recipe",
        choices=("delayed", "tensorwise", "blockwise", "mxfp8"),
        help="how FP8 scales are found (default: as in training)",
    )
    model.add_argument("--tokenizer", type=Path, metavar="FILE", help="if not where the run had it")
    model.add_argument(
        "--batch-size", type=_number(int, 1), default=16, metavar="N", help="prompts side by side (default: 16)"
    )
    model.add_argument("--no-cache", action="store_true", help="read the whole text again for every token (slow)")
    parser.add_argument("--json", action="store_true", help="a JSON object a line for each prompt")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: done; 2: an input is wrong, and standard error says which and what to use instead."""
    settings = make_parser().parse_intermixed_args(arguments)
    # They import torch, which --help does without.
    from megatron_fp8.evaluate.command_line import end_with_mistakes
    from megatron_fp8.faults.report import run_reporting
    from megatron_fp8.parallel.process_group import global_rank, world_size

    with ExitStack() as kept:
        with end_with_mistakes():
            checkpoint = kept.enter_context(kept_checkpoint(settings.checkpoint, settings.iteration))
            job = _prepare(checkpoint, settings, world_size())
        run_reporting(lambda: _run(job, settings), global_rank())
    return 0


@dataclass(frozen=True)
class _Job:
    """What is to be done, checked: the model, and prompts as text and as tokens."""

    saved: SavedModel
    tokenizer: Tokenizer
    prompts: list[str]
    tokens: list[list[int]]


def _prepare(checkpoint: Path, settings: argparse.Namespace, num_processes: int) -> _Job:
    """Look at everything that a person gave; raises BadInputError or CheckpointError."""
    from megatron_fp8.evaluate.files import model_tokenizer
    from megatron_fp8.generate.text import prompt_tokens

    wanted = InferenceSettings(num_processes, mode=settings.precision, fp8_recipe=settings.fp8_recipe)
    saved = read_saved_model(checkpoint, wanted, num_processes)
    tokenizer = model_tokenizer(saved, settings.tokenizer)
    if settings.prompts_file == "-" and num_processes > 1:
        raise BadInputError("--prompts-file -: of several processes only one has an input\n    use: the name of a file")
    prompts = [*settings.prompts, *_prompts_of(settings.prompts_file)] or [""]
    broken = [number for number, prompt in enumerate(prompts, 1) if not _is_unicode(prompt)]
    if broken:
        raise BadInputError(f"prompt {broken[0]} is no Unicode text\n    use: text in UTF-8")
    tokens = [prompt_tokens(tokenizer, prompt) for prompt in prompts]
    most = saved.num_positions
    long = [f"prompt {index + 1} has {len(row)} tokens" for index, row in enumerate(tokens) if len(row) >= most]
    if long:
        raise BadInputError(f"{'; '.join(long)}\n    use: at most {most - 1}: the model has {most} positions")
    return _Job(saved, tokenizer, prompts, tokens)


def _prompts_of(file: str | None) -> list[str]:
    """The lines of a file, or of standard input, that hold text."""
    if file is None:
        return []
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{file} cannot be read: {error}\n    use: a text file, a prompt a line") from error
    # Not `splitlines`, which ends lines at characters that may stand inside a text.
    return [line for line in text.split("\n") if line.strip()]


def _is_unicode(text: str) -> bool:
    """False where the command line, or standard input, had bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _run(job: _Job, settings: argparse.Namespace) -> None:
    from megatron_fp8.train.loaded_model import open_model

    with open_model(job.saved) as model:
        writes = model.groups.rank == 0
        for note in model.notes if writes else ():
            print(f"note: {note}", file=sys.stderr)
        _generate(job, model, settings, writes)


def _generate(job: _Job, model: LoadedModel, settings: argparse.Namespace, writes: bool) -> None:
    from megatron_fp8.generate.generation import Limits, generate
    from megatron_fp8.generate.sampling import Sampling
    from megatron_fp8.generate.text import TextStream

    limits = Limits(settings.max_new_tokens, job.tokenizer.eod_id)
    sampling = Sampling(settings.greedy, settings.temperature, settings.top_k, settings.top_p)
    streams = [TextStream(job.tokenizer, tokens) for tokens in job.tokens]
    follows = writes and len(job.prompts) == 1 and not settings.json and sys.stdout.isatty()
    if follows:
        _show(job.prompts[0])
    started, num_tokens = time.monotonic(), 0
    for first in range(0, len(job.prompts), settings.batch_size):
        batch = slice(first, first + settings.batch_size)
        own = streams[batch]

        def on_token(index: int, token: int, own: Sequence[TextStream] = own) -> None:
            piece = own[index].add(token)
            if follows:
                _show(piece)

        done = generate(
            model, job.tokens[batch], limits, sampling, settings.seed + first, on_token, not settings.no_cache
        )
        num_tokens += sum(len(continuation.tokens) for continuation in done)
        if follows:
            _show(own[0].rest() + "\n")
        elif writes:
            for line in _lines(job, own, done, first, settings.json):
                print(line, flush=True)
    if writes:
        seconds = time.monotonic() - started
        print(f"{num_tokens} tokens, {num_tokens / seconds:.1f} a second", file=sys.stderr)


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


def _number(kind: type, least: float, most: float = float("inf")) -> Any:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            limits = f"from {least}" + ("" if most == float("inf") else f" to {most}")
            raise argparse.ArgumentTypeError(f"{text!r} is no number {limits}")
        return value

    return read


if __name__ == "__main__":
    sys.exit(main())
