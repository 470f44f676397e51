"""Owns the view of a run in TensorBoard: its event files, by TensorBoard's own writer. Imports no torch."""

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

    `iteration`: what earlier event files have up to it is kept; TensorBoard forgets later steps of them when it reads
    the event that says so, the one it has for restarts. `newest`: the iteration up to which everything is there.
    """

    def __init__(self, directory: Path, iteration: int) -> None:
        goes_on = any(directory.glob(_EVENT_FILES))
        self.newest = iteration if goes_on else -1
        self._writer = EventFileWriter(str(directory))
        if goes_on:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=self.newest + 1, session_log=start))

    def write(self, record: Record) -> None:
        """Write the series of a record, to the disk at once."""
        series = series_of(record)
        if series is None:
            return
        step, values = series
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=float(record.get("time") or time.time()), step=step, summary=summary))
        # The writer's thread keeps an error to itself until it is asked.
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def remove_event_files(directory: Path) -> None:
    """Remove TensorBoard's files from a directory, to make them anew."""
    for path in directory.glob(_EVENT_FILES):
        path.unlink()
