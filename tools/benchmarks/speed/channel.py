"""Owns the talk between the benchmark and its measured processes: JSON lines over a Unix socket. Imports no torch.

A socket and not the standard streams: those of a process under torchrun are shared by all its ranks.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any


class ChannelClosedError(RuntimeError):
    """The other side is gone."""


class Channel:
    """One end of a connection. `send` and `receive` pass JSON objects; `receive` waits."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rw", encoding="utf-8")

    @classmethod
    def connect(cls, address: Path) -> Channel:
        """The measured process's end. Raises OSError when nobody listens at `address`."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(address))
        return cls(connection)

    def send(self, message: dict[str, Any]) -> None:
        """Send one object. Raises ChannelClosedError."""
        try:
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self) -> dict[str, Any]:
        """The next object. Raises ChannelClosedError."""
        try:
            line = self._stream.readline()
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not line:
            raise ChannelClosedError("the other process has ended")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
