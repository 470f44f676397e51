"""Prints, for the run that a config describes, every kind of tensor with its format and its bytes."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from megatron_fp8.config.fp8_formats import describe_formats
from megatron_fp8.config.load import load_config
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.data.check_data import check_data
from megatron_fp8.planner.plan import resolve_layout, resolve_sizes
from megatron_fp8.precision.chart import precision_chart
from megatron_fp8.precision.chart_labels import LABELS, format_chart, row_format, row_label, row_size
from megatron_fp8.precision.chart_rows import ChartRow

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
        loaded, vocab_size = resolve_sizes(load_config(settings.config, settings.overrides), check_data)
        layout = resolve_layout(loaded, settings.world_size, vocab_size)
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


def _table(rows: list[ChartRow], title: str) -> Table:
    table = Table("tensor", "format", "bytes", "per", title=title, title_justify="left")
    table.columns[2].justify = "right"
    section = None
    for row in rows:
        if row.section is not section:
            section = row.section
            table.add_section()
            table.add_row(f"[bold]{LABELS[section]}")
        table.add_row(row_label(row), row_format(row), row_size(row), LABELS[row.per])
    return table


if __name__ == "__main__":
    sys.exit(main())
