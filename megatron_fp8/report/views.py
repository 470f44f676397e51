"""Which sinks a run has by its config, where their files lie, and that each is guarded. Imports no torch.

Sinks come in the order in which they get a record: the record itself is first, so that views can be made from it.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from megatron_fp8.config.load import dump_config
from megatron_fp8.config.schema import Config
from megatron_fp8.report.events import Alerts
from megatron_fp8.report.guarded import Guarded, InThread, OpenSink, Say, say_on_stderr
from megatron_fp8.report.record import METRICS, JsonLines, Sink, count_rollbacks


def sinks_of_run(config: Config, run_directory: Path, console: Callable[[], Sink], iteration: int | None) -> list[Sink]:
    """The record and its views; `iteration`: where a run goes on from, None for a new one."""
    sinks: list[Sink] = [
        record_sink(run_directory),
        Guarded("the console", lambda _: (console(), -1), f"the record is in {run_directory / METRICS}"),
    ]
    kept = -1 if iteration is None else iteration
    again = f"tools/replay.py {run_directory}"
    record = run_directory / METRICS
    if config.logging.tensorboard_dir is not None:
        opens = opens_tensorboard(tensorboard_directory(config, run_directory))
        sinks.append(Guarded("TensorBoard", opens, f"{again} --tensorboard makes it anew", record, kept))
    if config.logging.wandb_project is not None and config.logging.wandb_mode != "disabled":
        opens = opens_wandb(config, run_directory, alerts_since=time.time())
        view = Guarded("wandb", opens, f"{again} --wandb makes it anew", record, kept)
        # A server may take long to answer, or never answer.
        sinks.append(InThread(view) if config.logging.wandb_mode == "online" else view)
    return sinks


def record_sink(run_directory: Path, say: Say = say_on_stderr) -> Guarded:
    """`metrics.jsonl`."""
    path = run_directory / METRICS
    return Guarded(str(path), lambda _: (JsonLines(path), -1), "make room on its disk", say=say)


def tensorboard_directory(config: Config, run_directory: Path) -> Path:
    """Where TensorBoard's files of a run go."""
    return run_directory / (config.logging.tensorboard_dir or "tensorboard")


def opens_tensorboard(directory: Path) -> OpenSink:
    """What opens the view in TensorBoard."""

    def open_view(kept: int) -> tuple[Sink, int]:
        # Only a run that wants it waits for its import.
        from megatron_fp8.report.tensorboard_sink import TensorBoardSink

        sink = TensorBoardSink(directory, kept)
        return sink, sink.newest

    return open_view


def opens_wandb(config: Config, run_directory: Path, alerts_since: float = math.inf) -> OpenSink:
    """What opens the view in wandb; the config must name a project.

    `alerts_since`: Unix time; of earlier records nobody is alerted.
    """
    alerts = Alerts(alerts_since)

    def open_view(_: int) -> tuple[Sink, int]:
        from megatron_fp8.report.wandb_sink import WandbRun, WandbSink

        settings = config.logging
        record = run_directory / METRICS
        rollbacks = count_rollbacks(record) if record.exists() else 0
        name = settings.wandb_exp_name or run_directory.name
        run = WandbRun(
            run_directory=run_directory,
            save_dir=run_directory / (settings.wandb_save_dir or "."),
            name=f"{name} rollback {rollbacks}" if rollbacks else name,
            rollbacks=rollbacks,
            logging=settings,
            config=yaml.safe_load(dump_config(config)),
        )
        sink = WandbSink(run, alerts)
        return sink, sink.newest

    return open_view
