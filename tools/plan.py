"""What a run will take, before anything runs: parameters, memory, FLOPs, messages, waiting, days; or which layouts fit.

Needs neither GPUs nor the training text. What the numbers mean: docs/planning.md.
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console

from megatron_fp8.config.config_warnings import config_warnings
from megatron_fp8.config.load import LoadedConfig, load_config
from megatron_fp8.data.check_data import check_data
from megatron_fp8.errors import BadInputError
from megatron_fp8.planner.flops import DEFAULT_MFU, UnknownPeakError
from megatron_fp8.planner.gpus import DEFAULT_GPU, GPUS
from megatron_fp8.planner.plan import make_plan, resolve_layout, resolve_sizes
from megatron_fp8.planner.plan_report import WIDTH_CHARS, plan_json, plan_tables
from megatron_fp8.planner.search import GPUS_PER_NODE, override_lines, search, search_json, search_tables

USAGE = "tools/plan.py CONFIG [--world-size N | --search N] [--gpu NAME] [section.key=value ...]"
_NO_LAYOUT_FITS = 1


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: done; 1: no layout fits; 2: the command line or the config is wrong."""
    settings = _parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_CHARS)
    try:
        loaded = load_config(settings.config, settings.overrides)
        loaded, vocab_size = resolve_sizes(loaded, check_data)
        if settings.search is None:
            _plan(loaded, vocab_size, settings, console)
            return 0
        return _search(loaded, vocab_size, settings, console)
    except (BadInputError, UnknownPeakError) as error:
        print(error, file=sys.stderr)
        return 2


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, usage=USAGE)
    parser.add_argument("config", metavar="CONFIG", help="YAML file, as in configs/quickstart.yaml")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replaces a value of CONFIG")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks (default: the fewest that fit)")
    parser.add_argument("--search", type=int, metavar="N", help="rank the layouts of N ranks instead")
    parser.add_argument("--gpu", choices=GPUS, default=DEFAULT_GPU, help=f"default: {DEFAULT_GPU}")
    parser.add_argument(
        "--tokens", type=float, metavar="N", help="budget, as in 1e12 (default: as many as the config trains on)"
    )
    parser.add_argument(
        "--mfu", type=float, default=DEFAULT_MFU, help=f"share of the dense BF16 peak (default: {DEFAULT_MFU})"
    )
    parser.add_argument("--gpus-per-node", type=int, default=GPUS_PER_NODE, help=f"default: {GPUS_PER_NODE}")
    parser.add_argument("--most", type=int, default=10, help="layouts of a search to show (default: 10)")
    parser.add_argument("--json", action="store_true", help="write plain data instead of tables")
    settings = parser.parse_intermixed_args(arguments)
    for name in ("world_size", "search", "gpus_per_node", "most"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: use 1 or more")
    if settings.search is not None and settings.world_size is not None:
        parser.error("--search N says how many ranks there are; leave --world-size out")
    if not 0 < settings.mfu <= 1:
        parser.error(f"--mfu {settings.mfu}: it is a share of the peak; use a number above 0 and at most 1, as in 0.4")
    if settings.tokens is not None and not 0 < settings.tokens < float("inf"):
        parser.error(f"--tokens {settings.tokens}: use a number above 0, as in 1e12")
    return settings


def _plan(loaded: LoadedConfig, vocab_size: int, settings: argparse.Namespace, console: Console) -> None:
    layout = resolve_layout(loaded, settings.world_size, vocab_size)
    for warning in config_warnings(loaded, layout):
        print(f"warning: {warning}", file=sys.stderr)
    plan = make_plan(loaded.config, layout, GPUS[settings.gpu], settings.tokens, settings.mfu)
    if settings.json:
        print(json.dumps(plan_json(plan), indent=2))
    else:
        console.print(plan_tables(plan))


def _search(loaded: LoadedConfig, vocab_size: int, settings: argparse.Namespace, console: Console) -> int:
    result = search(loaded, settings.search, vocab_size, GPUS[settings.gpu], settings.gpus_per_node)
    if settings.json:
        print(json.dumps(search_json(result, loaded.config, settings.most), indent=2))
    else:
        console.print(search_tables(result, settings.most))
        for line in override_lines(result, loaded.config, settings.most):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    return 0 if result.fitting else _NO_LAYOUT_FITS


if __name__ == "__main__":
    sys.exit(main())
