"""The processes of a benchmark: each calls one function, talks over a pipe and writes its output to a log.

Imports no torch: a process gets its environment before it imports the function that it calls, which is given by name.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

_LOG_LINES = 30
_SECONDS_TO_END = 20.0


class JobError(Exception):
    """A process that failed. `what` it did, its exit code if it has ended, and the last lines of its log."""

    def __init__(self, what: str, code: int | None, log: str) -> None:
        super().__init__(f"{what}. The end of its log:\n{log}")
        self.what, self.code, self.log = what, code, log


class Job:
    """`num_ranks` processes that call `function(connection, *arguments)`; leaving the context ends them.

    `function`: as in `package.module:name`. Several ranks find each other the way torchrun's do. A process should end
    when its connection is closed.
    """

    def __init__(self, function: str, *arguments: Any, num_ranks: int = 1, num_threads: int | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        common = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
        if num_ranks > 1:
            self._store, place = _rendezvous(num_ranks)
            common |= place
        self._directory = tempfile.TemporaryDirectory(prefix="benchmark-")
        self._log = Path(self._directory.name) / "log"
        self.connections: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else common
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(theirs, self._log, environment, function, arguments))
            process.daemon = True
            process.start()
            theirs.close()
            self.connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for process in self._processes:
                process.kill()
        self.close()

    def receive(self, timeout: float | None = None) -> list[Any]:
        """The next message of every rank, by rank. Raises JobError when one ends first, or after `timeout` seconds."""
        ends = None if timeout is None else time.monotonic() + timeout
        received: dict[Connection, Any] = {}
        while len(received) < len(self.connections):
            missing = [connection for connection in self.connections if connection not in received]
            ready = wait(missing, None if ends is None else max(0.0, ends - time.monotonic()))
            if not ready:
                raise JobError(f"sent nothing for {timeout:g} s", None, self._log_tail())
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    received[connection] = connection.recv()
                except (EOFError, OSError):
                    raise self._ended(self.connections.index(connection)) from None
        return [received[connection] for connection in self.connections]

    def ask(self, message: Any) -> list[Any]:
        """Send every rank `message`; their answers. Raises JobError."""
        for rank, connection in enumerate(self.connections):
            try:
                connection.send(message)
            except OSError:
                raise self._ended(rank) from None
        return self.receive()

    def close(self) -> JobError | None:
        """Wait for the processes, and kill those that do not end; the error of one that failed."""
        for connection in self.connections:
            connection.close()
        deadline = time.monotonic() + _SECONDS_TO_END
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        failed = next((process.exitcode for process in self._processes if process.exitcode), None)
        error = None if failed is None else JobError(f"ended with code {failed}", failed, self._log_tail())
        self._directory.cleanup()
        return error

    def _ended(self, rank: int) -> JobError:
        process = self._processes[rank]
        process.join(_SECONDS_TO_END)
        return JobError("ended", process.exitcode, self._log_tail())

    def _log_tail(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-_LOG_LINES:])


def run_jobs(calls: Sequence[tuple[Any, ...]], num_jobs: int) -> Iterator[tuple[int, Any]]:
    """Run each call, a function's name and its arguments, as a Job of its own, `num_jobs` at a time, in their order.

    Yields a call's index and what it sends, and its JobError if it fails, after which the others go on.
    """
    waiting = list(enumerate(calls))
    running: dict[Connection, tuple[int, Job]] = {}
    with ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < num_jobs:
                index, call = waiting.pop(0)
                job = stack.enter_context(Job(*call))
                running[job.connections[0]] = index, job
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                index, job = running[ready]
                try:
                    message = ready.recv()
                except (EOFError, OSError):
                    del running[ready]
                    message = job.close()
                    if message is None:
                        continue
                yield index, message


def _rendezvous(num_ranks: int) -> tuple[Any, dict[str, str]]:
    """A store in this process at a free port, and the variables by which ranks find it, as under torchrun."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }


def _main(
    connection: Connection, log: Path, environment: Mapping[str, str], function: str, arguments: tuple[Any, ...]
) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    try:
        pkgutil.resolve_name(function)(connection, *arguments)
    except Exception:  # noqa: BLE001 - whatever it is ends this process, and is shown from the log
        traceback.print_exc()
        os._exit(1)
    connection.close()
    # Without Python's shutdown, which can wait for a process group that nobody needs any more.
    os._exit(0)
