"""Owns what the command lines over a checkpoint's model have in common: its options, and how mistakes are said."""

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
    parser.add_argument("--iteration", type=positive, metavar="N", help="checkpoint of a run (default: the latest)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer (default: data.tokenizer_model of the run)"
    )
    parser.add_argument(
        "--precision", choices=("fp32", "fp16", "bf16", "fp8"), help="number format (default: that of the run)"
    )
    parser.add_argument(
        "--fp8-recipe",
        choices=("delayed", "tensorwise", "blockwise", "mxfp8"),
        help="how FP8 scales are found (default: as in the run); all but delayed need none from the run",
    )
    parser.add_argument(
        "--micro-batch-size", type=positive, metavar="N", help="samples of a forward pass (default: that of the run)"
    )
    for name, shared in (("tensor", "ranks that share each layer"), ("pipeline", "stages of layers")):
        parser.add_argument(f"--{name}-model-parallel-size", type=positive, default=1, metavar="N", help=shared)


def inference_settings(arguments: argparse.Namespace) -> InferenceSettings:
    """What the options of `add_model_options` ask for."""
    stages = arguments.pipeline_model_parallel_size
    return InferenceSettings(
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=stages,
        mode=arguments.precision,
        fp8_recipe=arguments.fp8_recipe,
        micro_batch_size=arguments.micro_batch_size,
        num_microbatches=_MICROBATCHES_PER_STAGE * stages if stages > 1 else 1,
    )


def not_negative(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 0 or more")
    return int(text)


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 1 or more")
    return int(text)


@contextmanager
def end_with_mistakes() -> Iterator[None]:
    """End the process with code 2 when what is inside says that an input is wrong; the first of the ranks speaks."""
    try:
        yield
    except (BadInputError, CheckpointError) as error:
        # It imports torch, which a program's --help does without.
        from megatron_fp8.parallel.process_group import global_rank

        if global_rank() == 0:
            print(error, file=sys.stderr, flush=True)
        else:
            # A launcher ends all ranks when it sees that one has ended, also one that is about to speak.
            time.sleep(SECONDS_FOR_RANK_ZERO)
        raise SystemExit(EXIT_CODE_BAD_INPUT) from None
