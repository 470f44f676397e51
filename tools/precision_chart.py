"""Prints, for the run that a config describes, every kind of tensor with its format and its bytes."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from megatron_fp8.config.check import check_config, fitting_world_sizes
from megatron_fp8.config.formats import describe_formats
from megatron_fp8.config.layout import Layout, derive_layout
from megatron_fp8.config.load import LoadedConfig, load_config
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.data.check import check_data
from megatron_fp8.precision.chart.chart import format_chart, format_size, precision_chart
from megatron_fp8.precision.chart.rows import ChartRow

USAGE = "tools/precision_chart.py CONFIG [--world-size N] [section.key=value ...]"


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: the chart is printed; 2: the command line or the config is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, usage=USAGE)
    parser.add_argument("config", metavar="CONFIG", help="YAML file, as in configs/quickstart.yaml")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replaces a value of CONFIG")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks (default: the fewest that fit)")
    settings = parser.parse_intermixed_args(arguments)
    if settings.world_size is not None and settings.world_size < 1:
        parser.error(f"--world-size {settings.world_size} is not a number of ranks, 1 or more")
    try:
        loaded = load_config(settings.config, settings.overrides)
        layout = _layout(loaded, settings.world_size)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    rows = precision_chart(loaded.config, layout)
    title = (
        f"{loaded.config.run.name}, TP {layout.tensor_model_parallel_size} x PP {layout.pipeline_model_parallel_size} "
        f"x DP {layout.data_parallel_size}: {describe_formats(loaded.config.precision, loaded.config.model.num_layers)}"
    )
    console = Console()
    if console.is_terminal:
        console.print(_table(rows, title))
    else:
        print(f"{title}\n{format_chart(rows)}")
    return 0


def _layout(loaded: LoadedConfig, world_size: int | None) -> Layout:
    """The layout, on the fewest ranks that fit unless told; raises ConfigError with every mistake of the formats.

    The tokenizer is read for its size where the config does not give one; missing text to train on is no mistake here.
    """
    config = loaded.config
    vocab_size = config.model.vocab_size
    report = None
    if vocab_size is None:
        report = check_data(config)
        vocab_size = report.vocab_size
    if world_size is None:
        world_size = next(iter(fitting_world_sizes(config)), None)
    problems = [item for item in check_config(loaded, world_size, vocab_size) if not item.key.startswith("data.")]
    if vocab_size is None and report is not None:
        problems += [problem for problem in report.problems if "tokenizer" in problem.key]
    if problems:
        raise ConfigError.from_problems(problems)
    if world_size is None or vocab_size is None:
        raise ConfigError("the size of the vocabulary is unknown; use model.vocab_size=N or data.tokenizer_model=FILE")
    return derive_layout(config, world_size, vocab_size)


def _table(rows: list[ChartRow], title: str) -> Table:
    table = Table("tensor", "format", "bytes", "per", title=title, title_justify="left")
    table.columns[2].justify = "right"
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            table.add_section()
            table.add_row(f"[bold]{section}")
        table.add_row(row.tensor, row.format, format_size(row), row.per)
    return table


if __name__ == "__main__":
    sys.exit(main())
