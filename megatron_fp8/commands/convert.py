"""Converts between checkpoints of this project and Hugging Face folders, a tensor at a time.

--list names the families of models that are converted, from any parallel layout and format; the weights are the FP32
master weights. An exported folder loads with transformers' AutoModelForCausalLM and AutoTokenizer. An import creates a
checkpoint and a config.yaml to fine-tune with. A config.json with anything that is not understood is refused by name.
Nothing is overwritten. Exit codes: 0: done; 1: the folder could not be written; 2: wrong input. Only 0 leaves a folder.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_fp8.checkpoint.manifest import CheckpointError
from megatron_fp8.commands.model_options import positive
from megatron_fp8.commands.progress_bars import items_bar
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf.export import ExportSettings, export_checkpoint
from megatron_fp8.hf.families import FAMILIES
from megatron_fp8.hf.import_model import ImportSettings, import_folder

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class ListFamilies(argparse.Action):
    """Prints the families and exits, as `--help` does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Called by argparse."""
        print(f"{'model_type':<14}{'class':<22}models")
        for family in FAMILIES.values():
            print(f"{family.model_type:<14}{family.architecture:<22}{family.examples}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action=ListFamilies, nargs=0, help="list the families of models, and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    export = commands.add_parser("export", help="checkpoint to Hugging Face folder")
    export.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="run directory, or one of its checkpoints")
    export.add_argument("out", metavar="OUT_FOLDER", type=Path, help="folder to create")
    export.add_argument(
        "--dtype", choices=("bf16", "fp32", "fp16"), help="format of the weights (default: the run's parameters')"
    )
    export.add_argument(
        "--max-shard-size", type=_num_bytes, default="5GB", metavar="SIZE", help="max file size (default: 5GB)"
    )
    export.add_argument(
        "--skip-verify", action="store_true", help="compare file sizes only (default: read and verify every byte)"
    )
    imported = commands.add_parser("import", help="Hugging Face folder to checkpoint")
    imported.add_argument("folder", metavar="HF_FOLDER", type=Path, help="folder with config.json, model.safetensors")
    imported.add_argument("out", metavar="OUT", type=Path, help="folder to create")
    imported.add_argument(
        "--seq-length", type=positive, metavar="N", help="tokens per sample (default: all positions of the model)"
    )
    for command in (export, imported):
        command.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json (default: the model's)")
        command.add_argument("--no-tokenizer", action="store_true", help="convert without a tokenizer")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit codes as above."""
    s = make_parser().parse_args(arguments)
    try:
        with items_bar("tensors") as on_tensor:
            if s.command == "export":
                wanted = ExportSettings(s.dtype, s.max_shard_size, s.tokenizer, not s.no_tokenizer, not s.skip_verify)
                exported = export_checkpoint(s.checkpoint, s.out, wanted, on_tensor)
                summary = f"{exported.num_bytes:,} bytes of weights in {exported.dtype}, from {exported.checkpoint}"
                notes = exported.notes
            else:
                settings = ImportSettings(s.seq_length, s.tokenizer, not s.no_tokenizer)
                imported = import_folder(s.folder, s.out, settings, on_tensor)
                start = f"pretrain.py {imported.config} data.train_data_path=[PREFIX]"
                summary = f"{imported.num_parameters:,} parameters. Fine-tune with\n  {start}"
                notes = imported.notes
    except (BadInputError, CheckpointError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"{s.out} could not be written: {error}", file=sys.stderr)
        sys.exit(1)
    print("\n".join([f"wrote {s.out}: {summary}", *(f"note: {note}" for note in notes)]))


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B?)", text.strip().upper())
    unit = _UNITS.get(match.group(2)) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; use a number with a unit, as in 5GB or 500MB")
    return size
