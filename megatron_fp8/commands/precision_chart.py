"""Prints every kind of tensor of the run that a config describes, with its format and its bytes.

Exit codes: 0: printed; 2: wrong command line or config.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_fp8.commands.model_options import positive
from megatron_fp8.config.fp8_formats import describe_formats
from megatron_fp8.config.load import load_config
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.data.check_data import check_data
from megatron_fp8.planner.plan import resolve_layout, resolve_sizes
from megatron_fp8.precision.chart import precision_chart
from megatron_fp8.precision.chart_labels import LABELS, format_chart, row_format, row_label, row_size
from megatron_fp8.precision.chart_rows import ChartRow


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit codes as above."""
    usage = "%(prog)s CONFIG [--world-size N] [section.key=value ...]"
    parser = argparse.ArgumentParser(description=__doc__, usage=usage)
    parser.add_argument("config", metavar="CONFIG", help="YAML file, such as configs/quickstart.yaml")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="overrides a value of CONFIG")
    parser.add_argument("--world-size", type=positive, metavar="N", help="ranks (default: the fewest that fit)")
    settings = parser.parse_intermixed_args(arguments)
    try:
        loaded, vocab_size = resolve_sizes(load_config(settings.config, settings.overrides), check_data)
        layout = resolve_layout(loaded, settings.world_size, vocab_size)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
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


def _table(rows: Sequence[ChartRow], title: str) -> Table:
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
