"""Owns the measured processes of one subject: starts them, speaks with each rank, ends them. Imports no torch.

Must not know what is measured when.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.speed.channel import Channel, ChannelClosedError
from benchmarks.speed.plan import Subject
from megatron_fp8.config.load import process_environment

_LOG_LINES = 30
_POLL_SECONDS = 0.5


class SubjectError(RuntimeError):
    """A measured process ended or did not start; the text has the end of its log."""


class SubjectProcesses:
    """The ranks of a subject, up and waiting; a context manager that ends them.

    `start_seconds`: from the start of the processes until the last rank had built its model. Raises SubjectError.
    """

    def __init__(self, subject: Subject, config: Path, overrides: list[str], start_timeout_seconds: float) -> None:
        self.subject = subject
        self._directory = tempfile.TemporaryDirectory(prefix="bench-")
        self._log = Path(self._directory.name) / "log"
        address = Path(self._directory.name) / "socket"
        self._channels: list[Channel] = []
        with ExitStack() as undo, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(subject.num_processes)
            started = time.perf_counter()
            self._process = self._start(address, config, overrides)
            undo.callback(self.close)
            self._accept(listener, started + start_timeout_seconds)
            try:
                greetings = [channel.receive() for channel in self._channels]
            except ChannelClosedError as error:
                raise self._error("ended while it started") from error
            undo.pop_all()
        self.start_seconds = time.perf_counter() - started
        self.num_parameters: int | None = greetings[0]["num_parameters"]

    def __enter__(self) -> SubjectProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, command: str) -> list[dict[str, Any]]:
        """Every rank's answer; they work at the same time."""
        try:
            for channel in self._channels:
                channel.send({"command": command})
            return [channel.receive() for channel in self._channels]
        except ChannelClosedError as error:
            raise self._error(f"ended during {command}") from error

    def close(self) -> None:
        """End the processes."""
        for channel in self._channels:
            try:
                channel.send({"command": "stop"})
            except ChannelClosedError:
                # It has ended already, which is what is wanted.
                continue
        try:
            self._process.wait(timeout=20 if self._channels else 0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self._directory.cleanup()

    def _start(self, address: Path, config: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
        subject = self.subject
        command = [sys.executable]
        if subject.num_processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={subject.num_processes}"]
        command += ["-m", "benchmarks.speed.worker", f"--address={address}"]
        command += [f"--implementation={subject.implementation}", f"--precision={subject.precision}"]
        command += [f"--threads={subject.num_threads}", str(config), *overrides]
        environment = {**process_environment(), "OMP_NUM_THREADS": str(subject.num_threads)}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        with self._log.open("wb") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def _accept(self, listener: socket.socket, deadline: float) -> None:
        listener.settimeout(_POLL_SECONDS)
        while len(self._channels) < self.subject.num_processes:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    raise self._error("ended while it started") from None
                if time.perf_counter() > deadline:
                    raise self._error("did not start in time") from None
                continue
            connection.setblocking(True)
            self._channels.append(Channel(connection))

    def _error(self, what: str) -> SubjectError:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        tail = "\n".join(text.splitlines()[-_LOG_LINES:])
        return SubjectError(f"subject {self.subject.name!r} {what}. The end of its log:\n{tail}")
