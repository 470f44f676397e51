"""Options of the command that trains, their help with all config keys, and what `--check` prints. Imports no torch."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import NoReturn

from megatron_fp8.config.check import fitting_world_sizes
from megatron_fp8.config.fields import FieldSpec, config_fields, section_doc
from megatron_fp8.config.fp8_formats import describe_formats
from megatron_fp8.config.layout import Layout
from megatron_fp8.config.problem import show_value
from megatron_fp8.config.schema import Config

_WIDTH_CHARS = 100
_MAX_WORLD_SIZES_SHOWN = 16

DESCRIPTION = """\
Pretrain a GPT model with tensor, pipeline and data parallelism, in FP32, FP16, BF16 or FP8.
Start one process per rank: torchrun --nproc-per-node N pretrain.py CONFIG [section.key=value ...]"""


class UsageError(Exception):
    """The command line is not of the form that `--help` shows; the text says where."""


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of ending the process: who may write is decided elsewhere."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.format_usage()}{self.prog}: {message}")


def make_parser() -> argparse.ArgumentParser:
    """The parser of `pretrain.py`'s command line. Its errors are UsageErrors."""
    parser = _Parser(
        # The dispatcher of `megatron-fp8` puts its own name there; else this is the script, whatever started it.
        prog=sys.argv[0] if sys.argv[0].startswith("megatron-fp8 ") else "pretrain.py",
        usage="%(prog)s CONFIG [section.key=value ...] [--resume[=auto]] [--check | --plan] [--world-size N] "
        "[--print-config] [--quiet]",
        description=DESCRIPTION,
        epilog=describe_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file; inherits from its `base:`")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="overrides a value of CONFIG")
    parser.add_argument(
        "--resume",
        dest="resume",
        action="store_const",
        const="latest",
        help="resume the run of this name from its latest checkpoint; --resume=auto: from the newest intact one, or "
        "start from scratch if there is none",
    )
    parser.add_argument("--resume-auto", dest="resume", action="store_const", const="auto", help=argparse.SUPPRESS)
    parser.add_argument(
        "--check", action="store_true", help="validate the config and exit; prints every error, or what would run"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print a resource estimate (memory, FLOPs, traffic, days) and exit; needs no dataset; "
        "tools/plan.py has more options",
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks, with --check or --plan")
    parser.add_argument("--print-config", action="store_true", help="print the full config as YAML and exit")
    parser.add_argument("--quiet", action="store_true", help="print only warnings and errors; console.log has the rest")
    parser.add_argument("-h", "--help", action="store_true", help="show this help and exit")
    return parser


def describe_keys() -> str:
    """Every config key with its type, default and meaning, by section."""
    lines = ["config keys (defaults in brackets; keys without one are required):"]
    section = ""
    for key, spec in config_fields().items():
        if spec.section != section:
            section = spec.section
            lines += ["", f"  {section}: {section_doc(section)}"]
        lines += [f"    {key}  {_type_and_default(spec)}", *_wrap(f"{spec.doc} {spec.reasons}".strip())]
    return "\n".join(lines)


def hint_for_option(argument: str) -> str:
    """What to write instead of an unknown option."""
    name, equals, value = argument.lstrip("-").partition("=")
    name = name.replace("-", "_")
    fields = config_fields()
    keys = [key for key, spec in fields.items() if name in (key, spec.name)]
    if not keys:
        return "--help lists the options and config keys"
    return f"{keys[0]}={value if equals else 'VALUE'} without dashes: config keys are not options"


def _type_and_default(spec: FieldSpec) -> str:
    return spec.description if spec.required else f"{spec.description}  [{show_value(spec.default)}]"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH_CHARS, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False)


def summarize(config: Config, layout: Layout) -> str:
    """What would run on `layout`, for a person."""
    model, parallel = config.model, config.parallel
    chunks = f", {layout.num_chunks} chunks a stage" if layout.num_chunks > 1 else ""
    sequence = ", sequence parallel" if parallel.sequence_parallel else ""
    optimizer = "distributed optimizer" if parallel.use_distributed_optimizer else "replicated optimizer"
    tokens = layout.tokens_per_global_batch
    return "\n".join(
        [
            f"{config.run.name}: can run on {layout.world_size} ranks",
            f"  model      {model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads, "
            f"{layout.num_query_groups} query groups, FFN {layout.ffn_hidden_size}, "
            f"vocabulary {layout.vocab_size:,} padded to {layout.padded_vocab_size:,}: "
            f"{layout.num_parameters:,} parameters",
            f"  precision  {describe_formats(config.precision, model.num_layers)}",
            f"  layout     TP {layout.tensor_model_parallel_size} x PP {layout.pipeline_model_parallel_size} x "
            f"DP {layout.data_parallel_size}{chunks}{sequence}, {optimizer}; "
            f"{layout.layers_per_stage} layers per stage",
            f"  batch      {layout.global_batch_size} samples = {layout.micro_batch_size} x DP "
            f"{layout.data_parallel_size} x {layout.num_microbatches} micro-batches; {tokens:,} tokens per step",
            f"  length     {config.training.train_iters:,} steps, {tokens * config.training.train_iters:,} tokens",
        ]
    )


def describe_world_sizes(config: Config) -> str:
    """Which world sizes the config fits, for a person who has not said how many ranks there will be."""
    sizes = fitting_world_sizes(config)
    if not sizes:
        return f"{config.run.name}: no world size fits"
    shown = ", ".join(str(size) for size in sizes[:_MAX_WORLD_SIZES_SHOWN])
    more = f", ... ({len(sizes)} in total)" if len(sizes) > _MAX_WORLD_SIZES_SHOWN else ""
    return f"{config.run.name}: can run on {shown}{more} ranks; --world-size N shows the layout"
