"""Plans a run before it starts: parameters, memory, FLOPs, communication, bubble, days; or searches layouts that fit.

Needs neither GPUs nor training text. What the numbers mean: docs/planning.md. Exit codes: 0: done; 1: no layout fits;
2: wrong command line or config.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console

from megatron_fp8.commands.model_options import positive
from megatron_fp8.config.config_warnings import config_warnings
from megatron_fp8.config.load import LoadedConfig, load_config
from megatron_fp8.data.check_data import check_data
from megatron_fp8.errors import BadInputError
from megatron_fp8.planner.flops import DEFAULT_MFU, UnknownPeakError
from megatron_fp8.planner.gpus import DEFAULT_GPU, GPUS
from megatron_fp8.planner.plan import Plan, make_plan, resolve_layout, resolve_sizes
from megatron_fp8.planner.plan_report import WIDTH_CHARS, plan_json, plan_tables
from megatron_fp8.planner.search import (
    GPUS_PER_NODE,
    SearchResult,
    override_lines,
    search,
    search_json,
    search_tables,
)

USAGE = "%(prog)s CONFIG [--world-size N | --search N] [--gpu NAME] [section.key=value ...]"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit codes as above."""
    settings = _parse(arguments)
    gpu = GPUS[settings.gpu]
    try:
        loaded, vocab_size = resolve_sizes(load_config(settings.config, settings.overrides), check_data)
        if settings.search is not None:
            result = search(loaded, settings.search, vocab_size, gpu, settings.gpus_per_node)
            _show_search(result, loaded, settings.most, settings.json)
            sys.exit(0 if result.fitting else 1)
        layout = resolve_layout(loaded, settings.world_size, vocab_size)
        for warning in config_warnings(loaded, layout):
            print(f"warning: {warning}", file=sys.stderr)
        _show_plan(make_plan(loaded.config, layout, gpu, settings.tokens, settings.mfu), settings.json)
    except (BadInputError, UnknownPeakError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, usage=USAGE)
    parser.add_argument("config", metavar="CONFIG", help="YAML file, such as configs/quickstart.yaml")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="overrides a value of CONFIG")
    parser.add_argument("--world-size", type=positive, metavar="N", help="ranks (default: the fewest that fit)")
    parser.add_argument("--search", type=positive, metavar="N", help="rank all layouts of N ranks instead")
    parser.add_argument("--gpu", choices=GPUS, default=DEFAULT_GPU, help=f"default: {DEFAULT_GPU}")
    parser.add_argument("--tokens", type=float, metavar="N", help="token budget, as in 1e12 (default: the config's)")
    parser.add_argument(
        "--mfu", type=float, default=DEFAULT_MFU, help=f"assumed share of the dense BF16 peak (default: {DEFAULT_MFU})"
    )
    parser.add_argument("--gpus-per-node", type=positive, default=GPUS_PER_NODE, help=f"default: {GPUS_PER_NODE}")
    parser.add_argument("--most", type=positive, default=10, help="layouts of a search to show (default: 10)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    settings = parser.parse_intermixed_args(arguments)
    if settings.search is not None and settings.world_size is not None:
        parser.error("--search N sets the number of ranks; leave --world-size out")
    if not 0 < settings.mfu <= 1:
        parser.error(f"--mfu {settings.mfu}: it is a share of the peak; use a number above 0 and at most 1, as in 0.4")
    if settings.tokens is not None and not 0 < settings.tokens < float("inf"):
        parser.error(f"--tokens {settings.tokens}: use a number above 0, as in 1e12")
    return settings


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH_CHARS)


def _show_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        print(json.dumps(plan_json(plan), indent=2))
    else:
        _console().print(plan_tables(plan))


def _show_search(result: SearchResult, loaded: LoadedConfig, num_shown: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps(search_json(result, loaded.config, num_shown), indent=2))
        return
    console = _console()
    console.print(search_tables(result, num_shown))
    for line in override_lines(result, loaded.config, num_shown):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
