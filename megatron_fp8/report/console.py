"""Owns what a person sees while a run goes on: a progress bar on a terminal, plain parsable lines elsewhere.

The same lines go to the run directory's `console.log`. Must not know where the numbers come from. Imports no torch.
"""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from megatron_fp8.report.record import Value

DATA_WAIT_WORTH_SAYING = 0.05


class ConsoleSink:
    """Lines on the console and in `log_path`; a bar below them when the console is a terminal.

    `iteration`: where a run goes on from.
    """

    def __init__(self, log_path: Path, train_iters: int, iteration: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._log = log_path.open("a", encoding="utf-8", buffering=1)
        self._train_iters = train_iters
        self._run_directory = log_path.parent
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=train_iters, completed=iteration, numbers="")
            self._progress.start()

    def write(self, record: Mapping[str, Value]) -> None:
        """Print a record as a line, and move the bar on; numbers of single tensors are for files and dashboards."""
        if record["event"] in ("fp8", "fp8-check"):
            return
        line = format_record(record, self._train_iters)
        if record["event"] == "end":
            line += f" | {self._run_directory}"
        self._log.write(line + "\n")
        (self._progress.console if self._progress else self._console).print(line, markup=False)
        if self._progress is not None and record["event"] == "train":
            self._progress.update(
                self._task,
                completed=float(record["iteration"] or 0),
                numbers=f"{_time_left(record)} left",
            )

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
        self._log.close()


def format_record(record: Mapping[str, Value], train_iters: int) -> str:
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
        parts.append(f"time left {_time_left(record)}")
        return " | ".join(parts)
    if record["event"] == "validation":
        total = "lm loss validation"
        sets = [f"{name} {value:.4f}" for name, value in record.items() if name.startswith(f"{total}/")]
        return " | ".join([f"iteration {record['iteration']}/{train_iters}", f"{total} {record[total]:.4f}", *sets])
    if record["event"] == "ready":
        return f"first step after {record['seconds-to-first-step']:.1f} s"
    if record["event"] == "checkpoint":
        return _format_checkpoint(record)
    if record["event"] == "fp8-fallback":
        return _format_fallback(record)
    if record["event"] == "end":
        return _format_end(record)
    told = {key: value for key, value in record.items() if key != "time"}
    if record["event"] == "start":
        return "\n".join(f"{key}: {value}" for key, value in told.items() if key != "event")
    return " | ".join(f"{key} {value}" for key, value in told.items())


def _format_fallback(record: Mapping[str, Value]) -> str:
    line = f"iteration {record['iteration']} | layer {record['layer']} runs in {record['runs in']} from now on"
    if record["runs in"] == "bf16":
        line += f": {record['tensor']} {record['quantity']} {record['value']:.3g} > {record['limit']:.3g}"
    return line


def _format_checkpoint(record: Mapping[str, Value]) -> str:
    megabytes = float(record["bytes"] or 0) / 1e6
    line = f"checkpoint {record['path']} | {megabytes:,.1f} MB in {float(record['seconds'] or 0.0):.1f} s"
    line += f", training waited {float(record['hold-up-seconds'] or 0.0):.2f} s"
    return line + (f" | removed {record['removed']}" if record["removed"] else "")


def _format_end(record: Mapping[str, Value]) -> str:
    stopped = record.get("stopped")
    line = f"{'finished' if stopped is None else 'stopped after'} {record['iteration']} iterations"
    line += f" in {format_seconds(float(record['seconds'] or 0.0))}"
    if stopped is not None:
        line += f" because of {stopped} (--resume goes on)"
    first, last = record["lm loss validation at start"], record["lm loss validation"]
    if isinstance(first, float) and isinstance(last, float):
        line += f" | lm loss validation {first:.4f} -> {last:.4f} ({last - first:+.4f} nats)"
    return line


def _number(value: Value, form: str) -> str:
    """A number that is withheld, such as the norm of gradients that overflowed, is shown as `-`."""
    return "-" if value is None else format(value, form)


def _time_left(record: Mapping[str, Value]) -> str:
    return format_seconds(float(record["seconds-left"] or 0.0))


def format_seconds(seconds: float) -> str:
    """A duration for people: `42 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
