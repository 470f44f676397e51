"""Measures the loss of a checkpoint on token files: in nats per token, as perplexity, and in bits per byte of text.

Every token of a file counts exactly once: the files are read in their own order in windows of the model's length, an
end-of-document token stands before the first, and the last window is as long as it is. Runs in one process, or under
torchrun on any layout; the number format may be another than that of the run.

    python tools/evaluate.py runs/quickstart --data data/quickstart/valid
    torchrun --nproc-per-node 2 tools/evaluate.py runs/quickstart --tensor-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_fp8.checkpoint.saved_model import SavedModel, kept_checkpoint, read_saved_model
from megatron_fp8.evaluate.command_line import add_model_options, end_with_mistakes, inference_settings, positive
from megatron_fp8.evaluate.files import EvaluationFile, evaluation_files, model_tokenizer
from megatron_fp8.evaluate.progress import WindowProgress

if TYPE_CHECKING:
    from megatron_fp8.data.tokenizer import Tokenizer
    from megatron_fp8.evaluate.file_loss import FileLoss


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="PREFIX", help="token files (default: the run's validation files)"
    )
    parser.add_argument(
        "--samples", type=positive, metavar="N", help="only N windows of each file, evenly spaced (default: all)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE too")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: measured; 2: an input is wrong; 1: anything else."""
    parser = make_parser()
    settings = parser.parse_args(arguments)
    if settings.json is not None and not settings.json.absolute().parent.is_dir():
        parser.error(f"--json {settings.json}: there is no directory {settings.json.parent}; make it first")
    # They import torch, which --help does without.
    from megatron_fp8.faults.report import run_reporting
    from megatron_fp8.parallel.process_group import global_rank, world_size

    with ExitStack() as kept:
        with end_with_mistakes():
            checkpoint = kept.enter_context(kept_checkpoint(settings.checkpoint, settings.iteration))
            saved = read_saved_model(checkpoint, inference_settings(settings), world_size())
            tokenizer = model_tokenizer(saved, settings.tokenizer)
            files = evaluation_files(saved, settings.data)
        losses, notes = run_reporting(lambda: measure(saved, tokenizer, files, settings.samples), global_rank())
        if global_rank() == 0:
            from megatron_fp8.evaluate.report import as_json, loss_table

            Console(width=None if sys.stdout.isatty() else 120).print(loss_table(saved, losses))
            for note in notes:
                print(f"note: {note}", file=sys.stderr)
            if settings.json is not None:
                text = json.dumps(as_json(saved, losses, world_size()), indent=2)
                settings.json.write_text(text + "\n", encoding="utf-8")
    return 0


def measure(
    saved: SavedModel, tokenizer: Tokenizer, files: list[EvaluationFile], num_windows: int | None
) -> tuple[list[FileLoss], tuple[str, ...]]:
    """(loss of each file, what could not be carried over from the checkpoint as it was), on every rank."""
    from megatron_fp8.train.loaded_model import open_model

    with open_model(saved) as model:
        # It looks for CUDA when imported.
        from megatron_fp8.evaluate.file_loss import measure_files

        with WindowProgress(model.groups.rank == 0) as on_windows:
            return list(measure_files(model, files, tokenizer, num_windows, on_windows)), model.notes


if __name__ == "__main__":
    sys.exit(main())
