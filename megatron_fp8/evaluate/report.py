"""Owns how what was measured is shown: tables for people, and JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from megatron_fp8.checkpoint.saved_model import SavedModel
from megatron_fp8.evaluate.file_loss import FileLoss


def loss_table(saved: SavedModel, losses: Sequence[FileLoss]) -> Table:
    """A row a file, and a total below several."""
    table = Table(title=f"{saved.checkpoint}, iteration {saved.manifest.iteration}, {_formats(saved)}")
    table.add_column("data", overflow="fold")
    for name in ("windows", "tokens", "loss, nats/token", "perplexity", "bits/byte"):
        table.add_column(name, justify="right")
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


def as_json(saved: SavedModel, losses: Sequence[FileLoss], world_size: int) -> dict[str, Any]:
    """The same with what it depends on; losses in nats per token."""
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
        # What JSON has no number for is a text, as in a run's record.
        "loss": row.loss if math.isfinite(row.loss) else str(row.loss),
        "perplexity": row.perplexity if math.isfinite(row.perplexity) else str(row.perplexity),
        "bits_per_byte": row.bits_per_byte,
    }


def _formats(saved: SavedModel) -> str:
    precision = saved.config.precision
    return f"fp8 ({precision.fp8_recipe} scaling)" if precision.mode == "fp8" else precision.mode


def harness_table(results: Mapping[str, Any]) -> Table:
    """A row a metric of each task, and of each group of tasks, from what lm-eval gives."""
    table = Table()
    table.add_column("task", overflow="fold")
    for name in ("documents", "few-shot"):
        table.add_column(name, justify="right")
    table.add_column("metric")
    for name in ("value", "standard error"):
        table.add_column(name, justify="right")
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        documents = results.get("n-samples", {}).get(task, {}).get("effective", "")
        shots = results.get("n-shot", {}).get(task, "")
        for key, value in values.items():
            metric, _, variant = key.partition(",")
            if not variant or metric.endswith("_stderr"):
                continue
            error = values.get(f"{metric}_stderr,{variant}")
            name = metric if variant == "none" else f"{metric} ({variant})"
            table.add_row(task, str(documents), str(shots), name, _number(value), _number(error))
    return table


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "-" if value in (None, "N/A") else str(value)
