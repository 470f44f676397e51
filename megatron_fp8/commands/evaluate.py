"""Measures the loss of a checkpoint on token files: nats per token, perplexity, and bits per byte of text.

Every token of a file counts exactly once: files are read in order in windows of the model's length, an end-of-document
token precedes the first, and the last window is as short as it is. Runs in one process, or under torchrun on any
layout; the number format may differ from the run's. Exit codes: 0: measured; 2: wrong input; 1: anything else.

    megatron-fp8 evaluate runs/quickstart --data data/quickstart/valid
    torchrun --nproc-per-node 2 tools/evaluate.py runs/quickstart --tensor-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron_fp8.checkpoint.saved_model import SavedModel, kept_checkpoint, read_saved_model
from megatron_fp8.commands.model_options import (
    add_model_options,
    exit_on_bad_input,
    inference_settings,
    positive,
    require_parent,
)
from megatron_fp8.commands.progress_bars import items_bar
from megatron_fp8.evaluate.files import EvaluationFile, evaluation_files, model_tokenizer

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
        "--samples", type=positive, metavar="N", help="measure N evenly spaced windows of each file (default: all)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit codes as above."""
    parser = make_parser()
    settings = parser.parse_args(arguments)
    require_parent(parser, "--json", settings.json)
    # They import torch, which --help does without.
    from megatron_fp8.faults.failure_report import run_reporting
    from megatron_fp8.parallel.process_group import global_rank, world_size

    with ExitStack() as kept:
        with exit_on_bad_input():
            checkpoint = kept.enter_context(kept_checkpoint(settings.checkpoint, settings.iteration))
            saved = read_saved_model(checkpoint, inference_settings(settings), world_size())
            tokenizer = model_tokenizer(saved, settings.tokenizer)
            files = evaluation_files(saved, settings.data)
        losses, notes = run_reporting(lambda: measure(saved, tokenizer, files, settings.samples), global_rank())
        if global_rank() == 0:
            Console(width=None if sys.stdout.isatty() else 120).print(loss_table(saved, losses))
            for note in notes:
                print(f"note: {note}", file=sys.stderr)
            if settings.json is not None:
                text = json.dumps(loss_json(saved, losses, world_size()), indent=2)
                settings.json.write_text(text + "\n", encoding="utf-8")


def measure(
    saved: SavedModel, tokenizer: Tokenizer, files: list[EvaluationFile], num_windows: int | None
) -> tuple[list[FileLoss], tuple[str, ...]]:
    """(loss of each file, what was not restored exactly from the checkpoint), on every rank."""
    from megatron_fp8.generate.loaded_model import open_model

    with open_model(saved) as model:
        # It looks for CUDA when imported.
        from megatron_fp8.evaluate.file_loss import measure_files

        with items_bar("windows", model.groups.rank == 0) as on_windows:
            return list(measure_files(model, files, tokenizer, num_windows, on_windows)), model.notes


def loss_table(saved: SavedModel, losses: Sequence[FileLoss]) -> Table:
    """A row for each file, and their total."""
    table = Table(title=f"{saved.checkpoint}, iteration {saved.manifest.iteration}, {_formats(saved)}")
    table.add_column("data", overflow="fold")
    for name in ("windows", "tokens", "loss, nats/token", "perplexity", "bits/byte"):
        table.add_column(name, justify="right")
    # It imports torch.
    from megatron_fp8.evaluate.file_loss import FileLoss

    rows = [*losses, *([FileLoss.total(losses)] if len(losses) > 1 else [])]
    for number, row in enumerate(rows):
        bits = row.bits_per_byte
        table.add_row(
            row.name,
            f"{row.num_windows:,}",
            f"{row.num_tokens:,}",
            f"{row.loss:.6f}",
            f"{row.perplexity:,.4f}",
            "-" if bits is None else f"{bits:.4f}",
            end_section=number == len(losses) - 1,
        )
    return table


def loss_json(saved: SavedModel, losses: Sequence[FileLoss], world_size: int) -> dict[str, Any]:
    """The same with what it depends on, as JSON; losses in nats per token."""
    # It imports torch.
    from megatron_fp8.evaluate.file_loss import FileLoss

    parallel = saved.config.parallel
    return {
        "checkpoint": str(saved.checkpoint),
        "iteration": saved.manifest.iteration,
        "precision": _formats(saved),
        "layout": {
            "world_size": world_size,
            "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
            "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        },
        "seq_length": saved.config.model.seq_length,
        "micro_batch_size": saved.config.training.micro_batch_size,
        "data": {row.name: _numbers(row) for row in losses},
        "total": _numbers(FileLoss.total(losses)),
    }


def _numbers(row: FileLoss) -> dict[str, float | int | str | None]:
    return {
        "windows": row.num_windows,
        "tokens": row.num_tokens,
        "bytes": row.num_bytes,
        # JSON has no infinity and NaN: text, as in a run's record.
        "loss": row.loss if math.isfinite(row.loss) else str(row.loss),
        "perplexity": row.perplexity if math.isfinite(row.perplexity) else str(row.perplexity),
        "bits_per_byte": row.bits_per_byte,
    }


def _formats(saved: SavedModel) -> str:
    precision = saved.config.precision
    return f"fp8 ({precision.fp8_recipe} scaling)" if precision.mode == "fp8" else precision.mode
