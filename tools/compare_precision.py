"""Compares number formats: the same small model, data and seeds in FP32, BF16, FP16, FP8 with each recipe, and in
torchao's FP8, tensorwise and rowwise.

Prints each mode's loss less the reference's beside the seed-to-seed spread, and the signal-to-quantization-noise ratio
of every GEMM operand. Each mode and seed runs in a process of its own, on the samples that the training loop would
read. What the numbers can say and what not: tools/benchmarks/formats/comparison.py. What was found: docs/precision.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.formats.plan import MODES, default_reference

if TYPE_CHECKING:
    from benchmarks.formats.comparison import Comparison, Failure
    from benchmarks.formats.plan import Plan, Preparation
    from benchmarks.processes import JobError

_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "compare.yaml"
_QUICK = ("training.train_iters=4", "optimizer.lr_warmup_iters=1", "model.num_layers=2")


class StoppedError(Exception):
    """Nothing can be compared; `code` is the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line to settings; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the config")
    parser.add_argument(
        "--config", type=Path, default=_CONFIG, help="model, data, steps (default: configs/compare.yaml)"
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=tuple(MODES),
        metavar="MODE",
        help=f"what to compare (default: all that the device can run): {', '.join(MODES)}",
    )
    parser.add_argument("--reference", choices=tuple(MODES), metavar="MODE", help="default: fp32, else bf16")
    parser.add_argument("--seeds", type=int, metavar="N", help="training.seed and the N - 1 after it (default: 3)")
    parser.add_argument(
        "--last", type=int, metavar="K", help="compare the mean loss of the last K steps (default: a fifth)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a run (default: CPUs / jobs)")
    parser.add_argument("--quick", action="store_true", help="4 steps of 2 layers, 1 seed: a look, not a result")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write comparison.json, losses.png and sqnr.png there (over older ones)"
    )
    settings = parser.parse_args(arguments)
    for name in ("seeds", "last", "jobs", "threads"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: use at least 1")
    settings.all_modes = settings.modes is None
    settings.modes = list(dict.fromkeys(settings.modes or MODES))
    settings.reference = settings.reference or default_reference(settings.modes)
    if settings.reference not in settings.modes:
        parser.error(f"--reference {settings.reference}: it is not among --modes {' '.join(settings.modes)}")
    if settings.out is not None and settings.out.exists() and not settings.out.is_dir():
        parser.error(f"--out {settings.out}: is a file; name a directory")
    settings.seeds = settings.seeds or (1 if settings.quick else 3)
    settings.threads = settings.threads or max(1, (os.cpu_count() or 1) // settings.jobs)
    if settings.quick:
        settings.overrides = [*_QUICK, *settings.overrides]
    return settings


def prepare_samples(plan: Plan, directory: Path) -> Preparation:
    """Every seed's samples, made in a process of its own. Raises StoppedError."""
    from benchmarks.formats.comparison import Failure
    from benchmarks.formats.plan import PrepareTask, samples_file
    from benchmarks.processes import JobError, run_jobs

    files = {seed: samples_file(directory, seed) for seed in plan.seeds}
    task = PrepareTask(plan.path, plan.overrides, files)
    ((_, result), *_) = run_jobs([("benchmarks.formats.worker:send_preparation", task)], 1)
    if isinstance(result, Failure):
        raise StoppedError(f"reading the data: {result.text}", 2)
    if isinstance(result, JobError):
        raise StoppedError(f"reading the data: {failure_text(result)}", 1)
    prepared: Preparation = result
    return prepared


def failure_text(failure: Failure | JobError) -> str:
    """What became of a process that gave no result."""
    if isinstance(failure, Exception):
        return f"its process ended with code {failure.code}. The end of its log:\n{failure.log}"
    return failure.text


def run_all(plan: Plan, directory: Path, settings: argparse.Namespace) -> list[Any]:
    """Results of the runs that ended well; what became of the others is said at once."""
    from benchmarks.formats.comparison import Failure
    from benchmarks.processes import JobError, run_jobs
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    tasks = plan.tasks(directory, settings.threads)
    num_steps = plan.base.config.training.train_iters
    console = Console(stderr=True, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    results = []
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=len(tasks) * num_steps)
        done = dict.fromkeys(range(len(tasks)), 0)

        def on_step(index: int, number: int) -> None:
            done[index] = number
            name = f"{tasks[index].mode}, seed {tasks[index].seed}"
            progress.update(bar, completed=sum(done.values()), description=name)

        def on_end(index: int, result: Any) -> None:
            on_step(index, num_steps)
            task = tasks[index]
            start = f"{index + 1} of {len(tasks)}: {task.mode}, seed {task.seed}"
            if isinstance(result, (Failure, JobError)):
                console.print(f"{start} failed: {failure_text(result)}", markup=False, highlight=False)
                return
            results.append(result)
            text = f"{start}: last loss {result.losses[-1]:.4f}, {result.seconds:.0f} s"
            console.print(text, markup=False, highlight=False)

        calls = [("benchmarks.formats.worker:send_run", task) for task in tasks]
        for index, message in run_jobs(calls, settings.jobs):
            if isinstance(message, int):
                on_step(index, message)
            else:
                on_end(index, message)
    return results


def compare(settings: argparse.Namespace) -> tuple[Comparison, bool]:
    """The comparison, and whether every run ended well. Raises BadInputError and StoppedError."""
    from dataclasses import replace

    from benchmarks.formats.comparison import Comparison, collect
    from benchmarks.formats.plan import make_plan

    plan = make_plan(settings.config, settings.overrides, settings.modes, settings.seeds)
    num_steps = plan.base.config.training.train_iters
    num_last = settings.last or max(1, num_steps // 5)
    if num_last > num_steps:
        raise StoppedError(f"--last {num_last}: there are training.train_iters={num_steps} steps; use at most that", 2)
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        directory = Path(name)
        preparation = prepare_samples(plan, directory)
        unsupported = {mode: why for mode, why in preparation.unsupported.items() if mode in plan.modes}
        for mode, why in unsupported.items():
            print(f"{mode} is left out: {why}", file=sys.stderr)
        if unsupported and not settings.all_modes:
            raise StoppedError("--modes: leave out what this device cannot run", 2)
        plan = replace(plan, modes=tuple(mode for mode in plan.modes if mode not in unsupported))
        results = run_all(plan, directory, settings)
    runs = collect(results, plan.modes, plan.seeds)
    if not runs:
        raise StoppedError("no mode ran to its end with every seed", 1)
    found = Comparison(plan.base.config, preparation.device, settings.reference, num_last, settings.threads, runs)
    return found, len(runs) == len(plan.modes)


def write(comparison: Comparison, directory: Path) -> None:
    """The three files."""
    from benchmarks.formats.pictures import draw_losses, draw_sqnr

    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(comparison.as_json(), indent=2, allow_nan=False)
    (directory / "comparison.json").write_text(text + "\n", encoding="utf-8")
    draw_losses(comparison, directory / "losses.png")
    draw_sqnr(comparison, directory / "sqnr.png")
    print(f"wrote comparison.json, losses.png and sqnr.png to {directory}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: compared; 1: a run failed (the other modes are compared all the same); 2: a wrong config or data."""
    settings = parse_arguments(arguments)
    from benchmarks.formats import report
    from rich.console import Console

    from megatron_fp8.errors import BadInputError

    try:
        comparison, is_whole = compare(settings)
    except BadInputError as error:
        print(error, file=sys.stderr)
        return 2
    except StoppedError as error:
        print(error, file=sys.stderr)
        return error.code
    report.show(comparison, Console())
    if settings.out is not None:
        write(comparison, settings.out)
    return 0 if is_whole else 1


# Processes that are spawned import this file.
if __name__ == "__main__":
    sys.exit(main())
