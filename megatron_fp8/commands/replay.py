"""Recreates the views of a run from its `metrics.jsonl`: TensorBoard files, and an offline run for `wandb sync`.

They replace existing ones and equal what the run itself would have written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_fp8.config.load import load_config
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.config.schema import Config
from megatron_fp8.report.guarded import OpenSink
from megatron_fp8.report.record import METRICS, BrokenLines, iteration_of, read_records
from megatron_fp8.report.views import opens_tensorboard, opens_wandb, tensorboard_directory

_NOTHING_KEPT = -1


class ReplayError(Exception):
    """The run cannot be read, or a view failed; the message says why."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the views; exit code 1: a view failed; 2: wrong run or command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a run that is not in progress, e.g. runs/quickstart")
    parser.add_argument("--tensorboard", action="store_true", help="write TensorBoard files (logging.tensorboard_dir)")
    parser.add_argument(
        "--wandb", action="store_true", help="write an offline wandb run, with the run's id if it has one"
    )
    parser.add_argument("--project", help="wandb project (default: the run's logging.wandb_project)")
    settings = parser.parse_args(arguments)
    if not settings.tensorboard and not settings.wandb:
        parser.error("nothing to write: use --tensorboard, --wandb or both")
    try:
        config = _config(settings.run)
    except (ReplayError, ConfigError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if settings.wandb and not (settings.project or config.logging.wandb_project):
        parser.error("--wandb needs --project NAME: the run has no logging.wandb_project")
    try:
        if settings.tensorboard:
            _replay_tensorboard(config, settings.run)
        if settings.wandb:
            _replay_wandb(config, settings.run, settings.project)
    except ReplayError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def _config(run: Path) -> Config:
    for name in (METRICS, "config.yaml"):
        if not (run / name).is_file():
            raise ReplayError(f"RUN {run}: {name} is missing; use a run directory, e.g. runs/quickstart")
    if not any(read_records(run / METRICS)):
        raise ReplayError(f"RUN {run}: {METRICS} has no records")
    return load_config(run / "config.yaml", []).config


def _replay_tensorboard(config: Config, run: Path) -> None:
    from megatron_fp8.report.tensorboard_sink import remove_event_files

    directory = tensorboard_directory(config, run)
    remove_event_files(directory)
    _replay("TensorBoard", opens_tensorboard(directory), run)
    print(f"wrote {directory}")


def _replay_wandb(config: Config, run: Path, project: str | None) -> None:
    update = {"wandb_mode": "offline", "wandb_project": project or config.logging.wandb_project}
    logging = config.logging.model_copy(update=update)
    _replay("wandb", opens_wandb(config.model_copy(update={"logging": logging}), run), run)


def _replay(name: str, open_sink: OpenSink, run: Path) -> None:
    broken = BrokenLines()
    try:
        sink, newest = open_sink(_NOTHING_KEPT)
        for record in read_records(run / METRICS, broken):
            if iteration_of(record, newest + 1) > newest:
                sink.write(record)
        sink.close()
    except Exception as error:
        raise ReplayError(f"{name} failed: {type(error).__name__}: {error}") from error
    if str(broken):
        print(f"{name}: {broken}", file=sys.stderr)
