"""Draws a run: losses, learning rate and tokens per second of a run directory's `metrics.jsonl`, as a PNG or SVG."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TRAIN_COLOUR, _VALIDATION_COLOUR, _OTHER_COLOUR = "#4477aa", "#cc3311", "#555555"


class RunError(Exception):
    """The run cannot be drawn; the text says why and what to use instead."""


@dataclass(frozen=True)
class Series:
    """Values of one series by iteration; NaN where a run's loss was not finite."""

    iterations: list[int]
    values: list[float]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every record of a `metrics.jsonl`. Raises RunError for a missing or foreign file, naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; name a run directory, as in runs/quickstart") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RunError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict) or "event" not in record:
            raise RunError(f"{path}, line {number} is not a record of a run: it has no event")
        records.append(record)
    return records


def series(records: Iterable[Mapping[str, Any]], event: str, name: str) -> Series:
    """The values called `name` of the records of one kind that have them."""
    found = [record for record in records if record["event"] == event and record.get(name) is not None]
    # Not finite numbers are written as texts, which JSON has.
    return Series([int(record["iteration"]) for record in found], [float(record[name]) for record in found])


def draw(records: list[dict[str, Any]], title: str, output: Path) -> None:
    """Write the picture of a run; its format is `output`'s suffix. Raises RunError without training records."""
    loss = series(records, "train", "lm loss")
    if not loss.iterations:
        raise RunError(f"{title} has no training step yet; wait for logging.log_interval steps")
    # Imported here so that help and mistakes need no matplotlib.
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise RunError("matplotlib is missing; install it with pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplot_mosaic([["loss", "loss"], ["lr", "speed"]], figsize=(9, 5.4), height_ratios=(2, 1))
    validation = series(records, "validation", "lm loss validation")
    top = axes["loss"]
    top.plot(loss.iterations, loss.values, color=_TRAIN_COLOUR, label="lm loss")
    # Points: nothing was measured between two evaluations.
    top.plot(validation.iterations, validation.values, "o", color=_VALIDATION_COLOUR, label="lm loss validation")
    for name in sorted({name for record in records for name in record if name.startswith("lm loss validation/")}):
        one = series(records, "validation", name)
        top.plot(one.iterations, one.values, ".--", linewidth=0.8, label=name)
    top.set_ylabel("nats per token")
    top.set_title(title)
    top.legend()
    _draw_small(axes["lr"], series(records, "train", "learning-rate"), "learning-rate")
    _draw_small(axes["speed"], series(records, "train", "tokens-per-second"), "tokens per second")
    axes["speed"].set_ylim(bottom=0)
    for axis in axes.values():
        axis.set_xlabel("iteration")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    plt.close(figure)


def _draw_small(axis: Any, values: Series, label: str) -> None:
    axis.plot(values.iterations, values.values, color=_OTHER_COLOUR)
    axis.set_ylabel(label)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: the picture is written; 2: the run or the output is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run directory, as in runs/quickstart")
    parser.add_argument("--output", type=Path, help="picture to write, .png or .svg (default: RUN/plot.png)")
    settings = parser.parse_args(arguments)
    output: Path = settings.output or settings.run / "plot.png"
    if output.suffix not in (".png", ".svg"):
        parser.error(f"--output {output}: the suffix {output.suffix!r} is no known format; use .png or .svg")
    if not output.absolute().parent.is_dir():
        parser.error(f"--output {output}: there is no directory {output.parent}; make it first")
    try:
        draw(read_records(settings.run / "metrics.jsonl"), settings.run.name, output)
    except RunError as error:
        print(f"RUN {settings.run}: {error}", file=sys.stderr)
        return 2
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
