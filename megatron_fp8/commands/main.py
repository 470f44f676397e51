"""`megatron-fp8 COMMAND ARGUMENTS`: runs a command of `megatron_fp8.commands`, importing no other.

Beside it stand the scripts `pretrain.py` and `tools/`, which run the same commands from a clone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from megatron_fp8 import __version__
from megatron_fp8.errors import BadInputError
from megatron_fp8.extras import missing_extra

_PROGRAM = "megatron-fp8"


@dataclass(frozen=True)
class Command:
    """A command: its module in `megatron_fp8.commands`, its line of help, and arguments that it always gets."""

    module: str
    help: str
    arguments: tuple[str, ...] = ()


COMMANDS = {
    "train": Command("train", "train a model; under torchrun on several ranks"),
    "check": Command("train", "validate a config, reporting every mistake", ("--check",)),
    "plan": Command("plan", "predict memory, FLOPs, communication and days, or search layouts"),
    "precision-chart": Command("precision_chart", "print the format and bytes of every kind of tensor"),
    "data": Command("data", "inspect, verify, merge and split token files"),
    "preprocess": Command("preprocess", "tokenize text into token files"),
    "checkpoint": Command("checkpoint", "inspect, verify and compare checkpoints"),
    "convert": Command("convert", "convert checkpoints to and from Hugging Face folders"),
    "evaluate": Command("evaluate", "measure the loss of a checkpoint on token files"),
    "generate": Command("generate", "generate text with the model of a checkpoint"),
    "lm-eval": Command("lm_eval", "evaluate a checkpoint on tasks of lm-eval"),
    "report": Command("report", "write the HTML report of a run, or a comparison of several"),
    "compare-runs": Command("compare_runs", "find the first step at which two runs differ"),
    "replay": Command("replay", "rewrite the TensorBoard and wandb views of a run from its record"),
    "doctor": Command("doctor", "report what is installed on this machine, and what of it works"),
    "dashboard": Command("dashboard", "print or save the wandb dashboard of runs"),
}


def usage() -> str:
    """The text of `--help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {_PROGRAM} COMMAND [ARGUMENTS ...]",
            "",
            "Pretrains GPT models with FP8 on Megatron Core and Transformer Engine, on GPUs and on CPUs.",
            "",
            "commands:",
            *lines,
            "",
            f"{_PROGRAM} COMMAND --help explains a command; {_PROGRAM} --version prints the version.",
            "Several ranks: torchrun --nproc-per-node N -m megatron_fp8 train CONFIG",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that `arguments` (default: the command line) name; wrong usage exits with code 2."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else 2)
    if words[0] == "--version":
        print(f"{_PROGRAM} {__version__}")
        return
    name, *rest = words
    command = COMMANDS.get(name)
    if command is None:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        _fail(f"unknown command {name!r}; {hint}")
        return
    # argparse takes the name of the program from here.
    sys.argv = [f"{_PROGRAM} {name}", *rest]
    try:
        import_module(f"megatron_fp8.commands.{command.module}").main([*command.arguments, *rest])
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        _fail(f"{name}: {missing}")
    except BadInputError as error:
        _fail(f"{name}: {error}")


def _fail(message: str) -> None:
    print(f"{_PROGRAM}: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
