"""Writes a run's series to TensorBoard event files, with TensorBoard's own writer. Imports no torch."""

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megatron_fp8.report.record import Record
from megatron_fp8.report.series_registry import series_of

_EVENT_FILES = "events.out.tfevents.*"


class TensorBoardSink:
    """Scalars in `directory`. Raises OSError.

    `iteration`: steps of earlier event files up to it are kept; a SessionLog event, as TensorBoard has it for restarts,
    makes it drop later ones. `newest`: the iteration up to which the files are complete.
    """

    def __init__(self, directory: Path, iteration: int) -> None:
        resumed = any(directory.glob(_EVENT_FILES))
        self.newest = iteration if resumed else -1
        self._writer = EventFileWriter(str(directory))
        if resumed:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=self.newest + 1, session_log=start))

    def write(self, record: Record) -> None:
        """Write the series of a record and flush."""
        series = series_of(record)
        if series is None:
            return
        step, values = series
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=float(record.get("time") or time.time()), step=step, summary=summary))
        # Raises an error of the writer's thread.
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def remove_event_files(directory: Path) -> None:
    """Remove TensorBoard's files from a directory."""
    for path in directory.glob(_EVENT_FILES):
        path.unlink()
