"""How a benchmark's result is shown: tables for people, JSON for programs. Imports no torch."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import cpu_model, versions
from benchmarks.speed.measurement import CheckpointCost, Comparison, SubjectResult, ceiling, ratio

_COST_ROWS = 24
_PACKAGES = ("torch", "megatron-core", "transformer-engine")


def machine() -> dict[str, Any]:
    """Where and with what the run was made."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": cpu_model(),
        "num_cpus": os.cpu_count(),
        **versions(_PACKAGES),
    }


def as_json(
    results: Sequence[SubjectResult], comparisons: Sequence[Comparison], flops_per_token: float
) -> dict[str, Any]:
    """Every sample and everything that is derived from them."""
    subjects = []
    for result in results:
        best = ceiling(results, result.subject)
        subjects.append(
            {
                **asdict(result),
                "tokens_per_second": result.tokens_per_second,
                "share_of_ceiling": result.tokens_per_second / best if best else None,
            }
        )
    ratios = []
    for comparison in comparisons:
        found = ratio(comparison, results)
        ratios.append({**asdict(found), "is_reached": found.is_reached})
    return {"machine": machine(), "gemm_flops_per_token": flops_per_token, "subjects": subjects, "ratios": ratios}


def show(
    results: Sequence[SubjectResult], comparisons: Sequence[Comparison], flops_per_token: float, console: Console
) -> None:
    """The two tables, and the profiles where they were made."""
    facts = machine()
    console.print(f"{facts['cpu']}, {facts['num_cpus']} CPUs; " + "; ".join(f"{p} {facts[p]}" for p in _PACKAGES))
    console.print(_speeds(results, flops_per_token))
    if any(result.is_short for result in results):
        console.print("* too slow here for whole steps: one small piece of a step, measured once.")
    console.print(_ratios(results, comparisons))
    for result in results:
        if result.costs:
            console.print(_costs(result))


def _costs(result: SubjectResult) -> Table:
    table = Table(title=f"One step of {result.subject.name}: largest costs, without what they call")
    table.add_column("operation")
    for heading in ("seconds", "share", "calls"):
        table.add_column(heading, justify="right")
    total = sum(cost.seconds for cost in result.costs)
    for cost in result.costs[:_COST_ROWS]:
        table.add_row(cost.name, f"{cost.seconds:.3f}", f"{cost.seconds / total:.1%}", f"{cost.num_calls:,}")
    return table


def _speeds(results: Sequence[SubjectResult], flops_per_token: float) -> Table:
    table = Table(title="Speed, memory, start")
    table.add_column("subject")
    headings = ("tokens/s", "range", "GFLOP/s", "of GEMM rate", "peak MiB/rank", "start s", "first step s", "loss")
    for heading in (*headings, "other CPUs"):
        table.add_column(heading, justify="right")
    for result in results:
        speeds = [sample.tokens_per_second for sample in result.rounds]
        best = ceiling(results, result.subject)
        is_model = _is_model(result)
        last_loss = result.rounds[-1].loss
        table.add_row(
            result.subject.name + ("*" if result.is_short else ""),
            f"{result.tokens_per_second:,.0f}",
            f"{min(speeds):,.0f} to {max(speeds):,.0f}",
            f"{result.tokens_per_second * flops_per_token / 1e9:.1f}",
            f"{result.tokens_per_second / best:.0%}" if best else "",
            f"{result.peak_memory_bytes / 2**20:,.0f}" if is_model else "",
            f"{result.start_seconds:.1f}",
            f"{result.first_step_seconds:.2f}" if is_model else "",
            f"{last_loss:.3f}" if last_loss is not None else "",
            f"{result.other_cpus:.1f}",
        )
    return table


def _ratios(results: Sequence[SubjectResult], comparisons: Sequence[Comparison]) -> Table:
    table = Table(title="Tokens/s over tokens/s, median of the rounds")
    table.add_column("ratio")
    for heading in ("median", "range", "by CPU time", "target", ""):
        table.add_column(heading, justify="right")
    for comparison in comparisons:
        found = ratio(comparison, results)
        verdict = {None: "", True: "reached", False: "missed"}[found.is_reached]
        table.add_row(
            f"{comparison.faster} / {comparison.slower}",
            f"{found.median:.2f}",
            f"{found.lowest:.2f} to {found.highest:.2f}",
            f"{found.by_cpu_time:.2f}",
            f"{comparison.target:.2f}" if comparison.target is not None else "",
            verdict,
        )
    return table


def _is_model(result: SubjectResult) -> bool:
    return result.subject.implementation != "gemm"


def checkpoint_table(cost: CheckpointCost) -> Table:
    """What checkpoints cost, beside `torch.save` of the same bytes."""
    megabytes = cost.state_bytes / 1e6
    table = Table(title=f"checkpoint of {megabytes:,.0f} MB of state, one rank")
    for column in ("", "seconds", "MB/s", "of torch.save"):
        table.add_column(column, justify="left" if not column else "right")
    rows = [
        ("training waits (save in the background)", cost.hold_up, cost.torch_save),
        ("whole save, checksums and commit included", cost.save, cost.torch_save),
        ("torch.save, one file", cost.torch_save, cost.torch_save),
        ("plain write", cost.write, cost.torch_save),
        ("load", cost.load, cost.torch_load),
        ("torch.load", cost.torch_load, cost.torch_load),
    ]
    for name, seconds, other in rows:
        table.add_row(name, f"{seconds:.3f}", f"{megabytes / seconds:,.0f}", f"{seconds / other:.2f}")
    table.caption = f"memory beyond that of training: {cost.extra_bytes / cost.state_bytes:.2f} of the state"
    return table
