"""The view of a run in Weights & Biases (wandb). Imports no torch.

**Steps.** wandb's own step is the iteration. It never goes back: wandb drops a row with an earlier step than the
newest. A job that resumes from an iteration before the newest that wandb has adds nothing until it has passed that one:
the points are those that it makes again. A rollback makes other points, so the run continues as another wandb run,
`NAME rollback 1`, which gets the whole record. Rewinding the run (`resume_from`) would replace the points, but not
every server can. A second step metric would draw both attempts on top of each other.

**Offline** a job that resumes writes one file of the whole run, from the record, in place of the earlier ones: wandb's
`sync` uploads a file as it is, and would put the second beside the first.

**Nodes.** Only rank 0's node reports its system metrics. wandb's way to have several (shared mode) ignores the step
that is given, and so the above; it also needs a network.
"""

import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import wandb
from wandb.sdk.lib.runid import generate_id
from wandb.sdk.wandb_alerts import AlertLevel

from megatron_fp8.checkpoint.manifest import write_atomically
from megatron_fp8.config.schema import LoggingConfig
from megatron_fp8.report.events import Alerts, Level, event_level, event_line, event_title
from megatron_fp8.report.record import Record
from megatron_fp8.report.series_registry import layer_maps, series_of

ID_FILE = "wandb_id.txt"
# An id as wandb's server takes it; on a second line the number of rollbacks that it is of.
_RUN_ID = re.compile(r"([A-Za-z0-9_-]{1,128})(?:\nrollbacks (\d+))?")
# The directory that the id is of: its number on the disk, which goes along when it is moved, and its path.
_PLACE_FILE = ".wandb_id_of"
# A thread waits for the server's answer, and again at each new attempt; the end of a run waits with it.
_MOST_SECONDS_TO_START = 30.0
# The run is over; what was not uploaded by then can be, later.
_MOST_SECONDS_TO_FINISH = 300.0
# wandb takes no longer title, and drops an alert with the title of one from less than a minute ago.
_MOST_TITLE_CHARS = 63
_ALERT_LEVELS = {Level.WARNING: AlertLevel.WARN, Level.ERROR: AlertLevel.ERROR}


@dataclass(frozen=True)
class WandbRun:
    """What a run is called, what it is of, and where its files lie.

    `config`: the run's config as it is shown. `save_dir`: wandb makes a directory `wandb` in it. `rollbacks`: how often
    the run has rolled back.
    """

    run_directory: Path
    save_dir: Path
    name: str
    logging: LoggingConfig
    config: Mapping[str, Any]
    rollbacks: int = 0


class WandbSink:
    """One wandb run. `newest`: the iteration up to which wandb has everything. Raises wandb's errors and OSError."""

    def __init__(self, run: WandbRun, alerts: Alerts) -> None:
        settings = run.logging
        self._offline = settings.wandb_mode == "offline"
        run_id = run_id_of(run.run_directory, run.rollbacks)
        run.save_dir.mkdir(parents=True, exist_ok=True)
        if self._offline:
            _remove_offline_files(run.save_dir, run_id)
        self._alerts = alerts
        self._run = wandb.init(
            project=settings.wandb_project,
            entity=settings.wandb_entity,
            group=settings.wandb_group,
            name=run.name,
            tags=settings.wandb_tags,
            notes=settings.wandb_notes,
            id=run_id,
            dir=str(run.save_dir),
            mode="offline" if self._offline else "online",
            # An offline file is of the whole run: what the server may have of it is to be overwritten.
            resume=None if self._offline else "allow",
            reinit="create_new",
            config=dict(run.config),
            settings=wandb.Settings(
                console="off",
                disable_git=True,  # the directory's repository is not the code's; its address may hold a password
                save_code=False,
                init_timeout=_MOST_SECONDS_TO_START,
                finish_timeout=_MOST_SECONDS_TO_FINISH,
            ),
        )
        self.newest = self._step = self._run.starting_step - 1
        self._num_layers = run.config["model"]["num_layers"]
        self._failed = False

    def write(self, record: Record) -> None:
        """Log a record's series; say what is no series as config, summary, alert or artifact."""
        event = record["event"]
        if event == "start":
            texts = {key: value for key, value in record.items() if key not in ("event", "time")}
            self._run.config.update({"start": texts}, allow_val_change=True)
        elif event in ("ready", "end"):
            self._run.summary.update({key: value for key, value in record.items() if key not in ("event", "time")})
        elif event == "failure":
            self._failed = True
        elif event == "checkpoint":
            self._reference(record)
        level = event_level(record)
        if level > Level.INFO:
            self._alert(record, _ALERT_LEVELS[level])
        series = series_of(record)
        if series is not None:
            self._log(*series, float(record.get("time") or time.time()))

    def close(self) -> None:
        """Finish the run; waits for the upload of what is left, for 5 minutes at most."""
        self._run.finish(exit_code=1 if self._failed else 0)
        if self._offline:
            # The file is whole when wandb's own process has ended; a job that failed ends without Python's shutdown.
            wandb.teardown()

    def _log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        # A checkpoint is reported when it is written, which may be some steps later.
        self._step = max(step, self._step)
        maps = {name: _map(row) for name, row in layer_maps(values, self._num_layers).items()}
        self._run.log({**values, **maps, "_timestamp": seconds}, step=self._step)

    def _alert(self, record: Record, level: AlertLevel) -> None:
        if not self._alerts.is_new(record):
            return
        self._run.alert(event_title(record)[:_MOST_TITLE_CHARS], event_line(record), level=level)

    def _reference(self, record: Record) -> None:
        """The checkpoint as an artifact that points to its files; none is read or uploaded."""
        path = Path(str(record["path"])).absolute()
        if not path.exists():  # a later one took its place
            return
        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", "model", metadata={"iteration": record["iteration"]})
        artifact.add_reference(path.as_uri(), checksum=False)
        self._run.log_artifact(artifact, aliases=[f"iteration-{record['iteration']}"])


def _map(row: list[float]) -> wandb.Histogram:
    """A value for each layer, as a histogram whose bins are the layers."""
    return wandb.Histogram(np_histogram=(np.array(row), np.arange(len(row) + 1)))


def run_id_of(run_directory: Path, rollbacks: int = 0) -> str:
    """The run's id at wandb, kept in its directory so that a job which resumes continues the same curves.

    A copy of a run's directory is another run, and gets an id of its own; one that was moved or restored is not. So is
    a run that has rolled back since: wandb never takes a step again. Raises ValueError for a text that is no id: it
    becomes part of the names of files, also of those that are removed.
    """
    path, place_file = run_directory / ID_FILE, run_directory / _PLACE_FILE
    here, inode = str(run_directory.resolve()), str(run_directory.stat().st_ino)
    if not path.exists():
        write_atomically(path, _id_text(generate_id(), rollbacks))
    text = path.read_text(encoding="utf-8").strip()
    match = _RUN_ID.fullmatch(text)
    if match is None:
        raise ValueError(f"{path} says {text!r}, which is not a run id: remove the file for a new one")
    run_id = match[1]
    place = place_file.read_text(encoding="utf-8") if place_file.exists() else ""
    made_for, _, made_at = place.strip().partition(" ")
    if place and inode != made_for and here != made_at:
        old, run_id = run_id, generate_id()
        write_atomically(path, _id_text(run_id, rollbacks))
        said = f"{here} is a copy of {made_at}, whose wandb run is {old}: its own is {run_id}"
        print(f"warning: {said}; to continue that one, write {old} into {path}", file=sys.stderr, flush=True)
    elif int(match[2] or 0) != rollbacks:
        run_id = generate_id()
        write_atomically(path, _id_text(run_id, rollbacks))
    if place != f"{inode} {here}\n":
        write_atomically(place_file, f"{inode} {here}\n")
    return run_id


def _id_text(run_id: str, rollbacks: int) -> str:
    return f"{run_id}\n" + (f"rollbacks {rollbacks}\n" if rollbacks else "")


def _remove_offline_files(save_dir: Path, run_id: str) -> None:
    for directory in (save_dir / "wandb").glob(f"offline-run-*-{run_id}"):
        shutil.rmtree(directory)
