"""Measures a checkpoint on downstream tasks with EleutherAI's lm-eval, without exporting it first.

Tasks are lm-eval's own, by name, or yaml files in a folder of yours (--include-path). Needs lm-eval:
pip install -e '.[eval]'. Runs in one process, or under torchrun on any layout; the number format may be another
than that of the run.

    python tools/lm_eval.py runs/quickstart --tasks arc_easy,hellaswag
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fp8.checkpoint.saved_model import SavedModel, kept_checkpoint, read_saved_model
from megatron_fp8.errors import BadInputError
from megatron_fp8.evaluate.command_line import add_model_options, end_with_mistakes, inference_settings, not_negative
from megatron_fp8.evaluate.files import model_tokenizer

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from megatron_fp8.data.tokenizer import Tokenizer


def make_parser() -> argparse.ArgumentParser:
    """The command line; options of lm-eval have its names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--tasks", required=True, metavar="NAME,...", help="names of tasks, groups or tags")
    parser.add_argument(
        "--include-path", "--include_path", type=Path, metavar="DIR", help="folder with yaml files of more tasks"
    )
    parser.add_argument(
        "--num-fewshot", "--num_fewshot", type=not_negative, metavar="N", help="examples shown (default: task's)"
    )
    parser.add_argument("--limit", type=_limit, metavar="N", help="documents of each task, or a share below 1")
    parser.add_argument("--gen-kwargs", "--gen_kwargs", metavar="KEY=VALUE,...", help="how tasks generate text")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="of few-shot examples and of sampled text")
    parser.add_argument("--output-path", "--output_path", type=Path, metavar="FILE", help="write all results as JSON")
    parser.add_argument(
        "--log-samples", "--log_samples", action="store_true", help="each document's answers in FILE too"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: measured; 2: an input is wrong; 1: anything else."""
    parser = make_parser()
    settings = parser.parse_args(arguments)
    output: Path | None = settings.output_path
    if output is not None and not output.absolute().parent.is_dir():
        parser.error(f"--output-path {output}: there is no directory {output.parent}; make it first")
    if settings.log_samples and output is None:
        parser.error("--log-samples needs --output-path FILE to write them to")
    # They import torch, which --help does without.
    from megatron_fp8.faults.report import run_reporting
    from megatron_fp8.parallel.process_group import global_rank, world_size

    with ExitStack() as kept:
        with end_with_mistakes():
            _require_lm_eval()
            if settings.include_path is not None and not settings.include_path.is_dir():
                raise BadInputError(f"--include-path {settings.include_path} is no directory")
            checkpoint = kept.enter_context(kept_checkpoint(settings.checkpoint, settings.iteration))
            saved = read_saved_model(checkpoint, inference_settings(settings), world_size())
            tokenizer = model_tokenizer(saved, settings.tokenizer)
        results = run_reporting(lambda: measure(saved, tokenizer, settings), global_rank())
        if results is not None:
            from rich.console import Console

            from megatron_fp8.evaluate.report import harness_table

            Console(width=None if sys.stdout.isatty() else 120).print(harness_table(results))
            if output is not None:
                # What is not JSON there, such as functions of tasks, is shown as text.
                output.write_text(
                    json.dumps(results, indent=2, default=str, ensure_ascii=False) + "\n", encoding="utf-8"
                )
    return 0


def measure(saved: SavedModel, tokenizer: Tokenizer, settings: argparse.Namespace) -> dict[str, Any] | None:
    """lm-eval's results on rank 0, None on the others. Raises BadInputError for tasks that there are not."""
    from megatron_fp8 import device
    from megatron_fp8.train.loaded_model import open_model

    # What lm-eval imports looks for CUDA.
    device.prepare()
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(settings.include_path) if settings.include_path else None)
    # Before the model is loaded, which can take minutes.
    tasks = _tasks(manager, settings.tasks)
    with open_model(saved) as model:
        from lm_eval.evaluator import simple_evaluate

        from megatron_fp8.evaluate.harness import HarnessModel

        for note in model.notes if model.groups.rank == 0 else ():
            print(f"note: {note}", file=sys.stderr)
        results: dict[str, Any] | None = simple_evaluate(
            model=HarnessModel(model, tokenizer, saved.config.training.micro_batch_size, settings.seed),
            tasks=tasks,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            gen_kwargs=settings.gen_kwargs,
            task_manager=manager,
            log_samples=settings.log_samples,
            fewshot_random_seed=settings.seed,
        )
        return results if model.groups.rank == 0 else None


def _tasks(manager: TaskManager, text: str) -> list[str]:
    """The tasks that `text` names. Raises BadInputError for one that there is not."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown or not names:
        raise BadInputError(
            f"--tasks: there is no task {', '.join(unknown) or 'named'}; `lm_eval ls tasks` lists those of lm-eval, "
            "--include-path DIR adds a folder's"
        )
    return list(manager.match_tasks(names))


def _limit(text: str) -> float:
    """Documents of a task: a whole number, or a share below 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (0 < value < 1 or (value >= 1 and value.is_integer())):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number, 1 or more, nor a share below 1")
    return value


def _require_lm_eval() -> None:
    """Make `import lm_eval` mean the library. Raises BadInputError where it is not installed."""
    # Python looks first into the folder of the program, which has the library's name.
    folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise BadInputError("lm-eval is not installed: pip install -e '.[eval]'") from error


if __name__ == "__main__":
    sys.exit(main())
