"""Owns the way back from Megatron's writer process to the rank that started it: one result, in a private file.

Megatron uses a manager's queue, whose server is a process of its own, one a rank, that imports the program again and
outlives a rank that is killed. A pipe would do for small results only: a writer cannot end before its reader has read.
Must not know what results are.
"""

import pickle
import queue
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async


class Mailbox:
    """What Megatron asks of a queue, for one result at a time; reaches forked processes."""

    def __init__(self) -> None:
        directory = tempfile.mkdtemp(prefix="checkpoint-")
        self._path = Path(directory) / "result"
        weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)

    def put(self, result: Any) -> None:
        """Leave a result; in the writer."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(pickle.dumps(result))
        temporary.replace(self._path)

    def get_nowait(self) -> Any:
        """Take the result; in the rank, after the writer has ended. Raises queue.Empty when it left none."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            raise queue.Empty from None
        self._path.unlink()
        # Written by this rank's own writer, in a directory that only this user may enter.
        return pickle.loads(content)


def use_mailbox() -> None:
    """Make Megatron's writers of this process leave their results in a mailbox."""
    if not isinstance(filesystem_async._results_queue, Mailbox):
        filesystem_async._results_queue = Mailbox()
