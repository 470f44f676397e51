"""Owns what a person sees while a run goes on: a live line on a terminal, plain parsable lines elsewhere.

The plain lines go to the run directory's `console.log` in any case. Must not know where the numbers come from. Imports
no torch.
"""

from pathlib import Path

from rich.console import Console

from megatron_fp8.report.durations import format_seconds
from megatron_fp8.report.events import MEASUREMENTS, Level, event_level, event_line
from megatron_fp8.report.live_line import LiveLine
from megatron_fp8.report.record import Record

DATA_WAIT_WORTH_SAYING = 0.05
# Numbers of single tensors are for files and dashboards.
_NO_LINE = MEASUREMENTS - {"train", "validation"}
_STYLES = {Level.INFO: "", Level.WARNING: "yellow", Level.ERROR: "bold red"}


class ConsoleSink:
    """Every record's line in `log_path`, and on the console what a person wants to see there.

    On a terminal that is one live line with the newest numbers, and above it whatever else happens; in a pipe or a file
    every line. `quiet`: warnings and errors alone. `iteration`: where a run goes on from.
    """

    def __init__(
        self,
        log_path: Path,
        train_iters: int,
        iteration: int = 0,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._log = log_path.open("a", encoding="utf-8", buffering=1)
        self._train_iters = train_iters
        self._run_directory = log_path.parent
        self._quiet = quiet
        # Colours may be forced where there is no terminal; a line that moves may not.
        live = not quiet and self._console.is_interactive and self._console.file.isatty()
        self._live_line = LiveLine(self._console, train_iters, iteration) if live else None

    def write(self, record: Record) -> None:
        """Log a record's line and show it, or take its numbers into the live line."""
        if record["event"] not in _NO_LINE:
            line = format_record(record, self._train_iters)
            if record["event"] == "end":
                line += f" | {self._run_directory}"
            self._log.write(line + "\n")
            self._show(record, line)
        if self._live_line is not None:
            self._live_line.take(record)

    def close(self) -> None:
        """Take the live line away."""
        if self._live_line is not None:
            self._live_line.close()
        self._log.close()

    def _show(self, record: Record, line: str) -> None:
        level = event_level(record)
        if self._live_line is not None:
            if record["event"] != "train":
                self._console.print(line, markup=False, style=_STYLES[level])
        elif not self._quiet or level > Level.INFO:
            self._console.print(line, markup=False)


def format_record(record: Record, train_iters: int) -> str:
    """A record as one line: `name value | name value | ...`."""
    if record["event"] == "train":
        parts = [f"iteration {record['iteration']:>{len(str(train_iters))}}/{train_iters}"]
        parts.append(f"lm loss {_number(record['lm loss'], '.4f')}")
        parts.append(f"grad-norm {_number(record['grad-norm'], '.3f')}")
        parts.append(f"learning-rate {record['learning-rate']:.2e}")
        parts += [f"{name} {record[name]:g}" for name in ("loss-scale", "skipped-iterations") if record.get(name)]
        parts.append(f"tokens/s {record['tokens-per-second']:,.0f}")
        if float(record.get("data-wait-share") or 0.0) >= DATA_WAIT_WORTH_SAYING:
            parts.append(f"waits for data {record['data-wait-share']:.0%}")
        parts.append(f"time left {format_seconds(float(record['seconds-left'] or 0.0))}")
        return " | ".join(parts)
    if record["event"] == "validation":
        total = "lm loss validation"
        sets = [f"{name} {_number(value, '.4f')}" for name, value in record.items() if name.startswith(f"{total}/")]
        return " | ".join(
            [f"iteration {record['iteration']}/{train_iters}", f"{total} {_number(record[total], '.4f')}", *sets]
        )
    return event_line(record)


def _number(value: float | None, form: str) -> str:
    """A number that is withheld is shown as `-`: the norm of gradients that overflowed, the loss of no tokens."""
    return "-" if value is None else format(value, form)
