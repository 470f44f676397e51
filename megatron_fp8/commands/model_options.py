"""Options of the commands that run a checkpoint's model, and how these end on wrong input."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_fp8.checkpoint.manifest import CheckpointError
from megatron_fp8.checkpoint.saved_model import InferenceSettings
from megatron_fp8.commands.rank_zero_output import EXIT_CODE_BAD_INPUT, SECONDS_FOR_RANK_ZERO
from megatron_fp8.errors import BadInputError

_MICROBATCHES_PER_STAGE = 4


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The checkpoint and how its model runs."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="run directory, or one of its checkpoints")
    parser.add_argument("--iteration", type=non_negative, metavar="N", help="iteration to use (default: the latest)")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer file (default: the run's)")
    add_format_options(parser)
    parser.add_argument(
        "--micro-batch-size", type=positive, metavar="N", help="samples per forward pass (default: the run's)"
    )
    for name, split in (("tensor", "ranks that share each layer"), ("pipeline", "pipeline stages")):
        parser.add_argument(
            f"--{name}-model-parallel-size", type=positive, default=1, metavar="N", help=f"{split} (default: 1)"
        )


def add_format_options(parser: argparse._ActionsContainer) -> None:
    """The number format that the model runs in."""
    parser.add_argument(
        "--precision", choices=("fp32", "fp16", "bf16", "fp8"), help="number format (default: the run's)"
    )
    parser.add_argument(
        "--fp8-recipe",
        choices=("delayed", "tensorwise", "blockwise", "mxfp8"),
        help="recipe for FP8 scales (default: the run's); all but delayed need no scales from the run",
    )


def inference_settings(options: argparse.Namespace) -> InferenceSettings:
    """What the options of `add_model_options` ask for."""
    stages = options.pipeline_model_parallel_size
    return InferenceSettings(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=stages,
        mode=options.precision,
        fp8_recipe=options.fp8_recipe,
        micro_batch_size=options.micro_batch_size,
        num_microbatches=_MICROBATCHES_PER_STAGE * stages if stages > 1 else 1,
    )


def non_negative(text: str) -> int:
    """An integer, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def positive(text: str) -> int:
    """An integer, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def require_parent(parser: argparse.ArgumentParser, option: str, file: Path | None) -> None:
    """End with a usage error if the directory of an output file does not exist."""
    if file is not None and not file.absolute().parent.is_dir():
        parser.error(f"{option} {file}: the directory {file.parent} does not exist; create it first")


@contextmanager
def exit_on_bad_input() -> Iterator[None]:
    """Exit with code 2 on BadInputError or CheckpointError; rank 0 prints it."""
    try:
        yield
    except (BadInputError, CheckpointError) as error:
        # It imports torch, which --help does without.
        from megatron_fp8.parallel.process_group import global_rank

        if global_rank() == 0:
            print(error, file=sys.stderr, flush=True)
        else:
            # A launcher ends all ranks when one has ended, even rank 0 before it has printed.
            time.sleep(SECONDS_FOR_RANK_ZERO)
        raise SystemExit(EXIT_CODE_BAD_INPUT) from None
