"""Converts between checkpoints of this project and Hugging Face folders, a tensor at a time.

Llama's form (RMSNorm, gated MLP, RoPE, grouped queries) and GPT-2's (LayerNorm, learned positions, biases), from any
parallel layout and format; the weights are the FP32 masters. An exported folder loads with transformers'
AutoModelForCausalLM and AutoTokenizer. An imported one holds a checkpoint and a config.yaml to fine-tune with.
Nothing is overwritten.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_fp8.checkpoint.manifest import CheckpointError
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf.export import ExportSettings, export_checkpoint
from megatron_fp8.hf.take_in import ImportSettings, import_folder

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="a checkpoint to a Hugging Face folder")
    export.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="run directory, or one of its checkpoints")
    export.add_argument("out", metavar="OUT_FOLDER", type=Path, help="folder to make")
    export.add_argument(
        "--dtype", choices=("bf16", "fp32", "fp16"), help="of the weights (default: that of the run's parameters)"
    )
    export.add_argument(
        "--max-shard-size", type=_num_bytes, default="5GB", metavar="SIZE", help="of a file, as 500MB (default: 5GB)"
    )
    export.add_argument(
        "--skip-verify", action="store_true", help="compare sizes only; without: every byte of the checkpoint is read"
    )
    taken = commands.add_parser("import", help="a Hugging Face folder to a checkpoint")
    taken.add_argument("folder", metavar="HF_FOLDER", type=Path, help="folder with config.json and model.safetensors")
    taken.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    taken.add_argument(
        "--seq-length", type=_positive, metavar="N", help="tokens per sample (default: the model's positions)"
    )
    for command in (export, taken):
        command.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json, if not the model's own")
        command.add_argument("--no-tokenizer", action="store_true", help="convert without a tokenizer")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: the folder is whole; 2: an input is wrong; 1: the disk is full or the like. Then nothing is left."""
    settings = make_parser().parse_args(arguments)
    try:
        with _progress() as on_tensor:
            summary = (_export if settings.command == "export" else _import)(settings, on_tensor)
    except (BadInputError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{settings.out} could not be written: {error}", file=sys.stderr)
        return 1
    print(summary)
    return 0


def _export(settings: argparse.Namespace, on_tensor: Callable[[str, int], None]) -> str:
    wanted = ExportSettings(
        settings.dtype,
        settings.max_shard_size,
        settings.tokenizer,
        not settings.no_tokenizer,
        not settings.skip_verify,
    )
    done = export_checkpoint(settings.checkpoint, settings.out, wanted, on_tensor)
    summary = f"wrote {settings.out}: {done.num_bytes:,} bytes of weights in {done.dtype}, from {done.checkpoint}"
    return "\n".join([summary, *(f"note: {note}" for note in done.notes)])


def _import(settings: argparse.Namespace, on_tensor: Callable[[str, int], None]) -> str:
    wanted = ImportSettings(settings.seq_length, settings.tokenizer, not settings.no_tokenizer)
    done = import_folder(settings.folder, settings.out, wanted, on_tensor)
    summary = f"wrote {settings.out}: {done.num_parameters:,} parameters. Fine-tune with"
    start = f"  pretrain.py {done.config} data.train_data_path=[PREFIX]"
    return "\n".join([summary, start, *(f"note: {note}" for note in done.notes)])


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """A bar over tensors, on standard error; gives what is to be called for each."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task("looking at the files", total=None)
        yield lambda name, total: display.update(task, description=name, total=total, advance=1)


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B?)", text.strip().upper())
    unit = _UNITS.get(match.group(2)) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 5GB or 500MB")
    return size


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
