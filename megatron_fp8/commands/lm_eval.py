"""Evaluates a checkpoint on downstream tasks with EleutherAI's lm-eval, without exporting it first.

Tasks are lm-eval's, by name, or YAML files in a folder (--include-path). Needs lm-eval: pip install -e '.[eval]'. Runs
in one process, or under torchrun on any layout; the number format may differ from the run's. Exit codes: 0: measured;
2: wrong input; 1: anything else.

    megatron-fp8 lm-eval runs/quickstart --tasks arc_easy,hellaswag
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
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
    non_negative,
    require_parent,
)
from megatron_fp8.errors import BadInputError
from megatron_fp8.evaluate.files import model_tokenizer

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from megatron_fp8.data.tokenizer import Tokenizer


def make_parser() -> argparse.ArgumentParser:
    """The command line; lm-eval's options keep their names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--tasks", required=True, metavar="NAME,...", help="names of tasks, groups or tags")
    parser.add_argument(
        "--include-path", "--include_path", type=Path, metavar="DIR", help="folder with YAML files of more tasks"
    )
    parser.add_argument(
        "--num-fewshot", "--num_fewshot", type=non_negative, metavar="N", help="few-shot examples (default: the task's)"
    )
    parser.add_argument("--limit", type=_limit, metavar="N", help="documents per task, or a share below 1")
    parser.add_argument("--gen-kwargs", "--gen_kwargs", metavar="KEY=VALUE,...", help="generation settings of tasks")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="for few-shot examples and sampling")
    parser.add_argument("--output-path", "--output_path", type=Path, metavar="FILE", help="write results as JSON")
    parser.add_argument(
        "--log-samples", "--log_samples", action="store_true", help="also write each document's answers to FILE"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit codes as above."""
    parser = make_parser()
    settings = parser.parse_args(arguments)
    output: Path | None = settings.output_path
    require_parent(parser, "--output-path", output)
    if settings.log_samples and output is None:
        parser.error("--log-samples needs --output-path FILE")
    # They import torch, which --help does without.
    from megatron_fp8.faults.failure_report import run_reporting
    from megatron_fp8.parallel.process_group import global_rank, world_size

    with ExitStack() as kept:
        with exit_on_bad_input():
            _require_lm_eval()
            if settings.include_path is not None and not settings.include_path.is_dir():
                raise BadInputError(f"--include-path {settings.include_path} is not a directory")
            checkpoint = kept.enter_context(kept_checkpoint(settings.checkpoint, settings.iteration))
            saved = read_saved_model(checkpoint, inference_settings(settings), world_size())
            tokenizer = model_tokenizer(saved, settings.tokenizer)
        options = {
            "num_fewshot": settings.num_fewshot,
            "limit": settings.limit,
            "gen_kwargs": settings.gen_kwargs,
            "log_samples": settings.log_samples,
        }
        results = run_reporting(
            lambda: measure(saved, tokenizer, settings.tasks, settings.include_path, settings.seed, options),
            global_rank(),
        )
        if results is not None:
            Console(width=None if sys.stdout.isatty() else 120).print(harness_table(results))
            if output is not None:
                # Values that JSON lacks, such as functions of tasks, become text.
                text = json.dumps(results, indent=2, default=str, ensure_ascii=False)
                output.write_text(text + "\n", encoding="utf-8")


def measure(
    saved: SavedModel,
    tokenizer: Tokenizer,
    task_names: str,
    include_path: Path | None,
    seed: int,
    options: Mapping[str, Any],
) -> dict[str, Any] | None:
    """lm-eval's results on rank 0, None on the others; `options`: of its `simple_evaluate`.

    Raises BadInputError for unknown tasks.
    """
    from megatron_fp8 import device
    from megatron_fp8.generate.loaded_model import open_model

    # lm-eval imports modules that look for CUDA.
    device.prepare()
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(include_path) if include_path else None)
    # Before the model is loaded, which can take minutes.
    tasks = _tasks(manager, task_names)
    with open_model(saved) as model:
        from lm_eval.evaluator import simple_evaluate

        from megatron_fp8.evaluate.harness import HarnessModel

        for note in model.notes if model.groups.rank == 0 else ():
            print(f"note: {note}", file=sys.stderr)
        harness_model = HarnessModel(model, tokenizer, saved.config.training.micro_batch_size, seed)
        results: dict[str, Any] | None = simple_evaluate(
            model=harness_model, tasks=tasks, task_manager=manager, fewshot_random_seed=seed, **options
        )
        return results if model.groups.rank == 0 else None


def _tasks(manager: TaskManager, text: str) -> list[str]:
    """The tasks that `text` names. Raises BadInputError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown or not names:
        raise BadInputError(
            f"--tasks: {'unknown task ' + ', '.join(unknown) if unknown else 'no task is named'}; `lm_eval ls tasks` "
            "lists lm-eval's, --include-path DIR adds a folder's"
        )
    return list(manager.match_tasks(names))


def _limit(text: str) -> float:
    """Documents per task: an integer, or a share below 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (0 < value < 1 or (value >= 1 and value.is_integer())):
        raise argparse.ArgumentTypeError(f"{text!r} is neither an integer of at least 1 nor a share below 1")
    return value


def _require_lm_eval() -> None:
    """Make `import lm_eval` mean the library. Raises BadInputError if it is not installed."""
    # Python looks first into the folder of the script, which has the library's name.
    sys.path[:] = [entry for entry in sys.path if not (Path(entry or ".") / "lm_eval.py").is_file()]
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise BadInputError("lm-eval is not installed: pip install -e '.[eval]'") from error


def harness_table(results: Mapping[str, Any]) -> Table:
    """A row for each metric of each task and group of tasks, from lm-eval's results."""
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
