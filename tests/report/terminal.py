"""A program on a terminal of its own, and what that terminal shows: the few control sequences that rich uses."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_SEQUENCE = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|(\r|\n)|([^\x1b\r\n]+)")


@dataclass
class Screen:
    """Lines of any number, no wrapping: a test asks that nothing is wider than the terminal."""

    lines: list[str] = field(default_factory=lambda: [""])
    row: int = 0
    column: int = 0
    cursor_visible: bool = True
    widest: int = 0
    last_lines: list[str] = field(default_factory=list)
    """The line with the cursor, after each change of it."""

    def feed(self, text: str) -> None:
        """Take what a program wrote."""
        position = 0
        while position < len(text):
            match = _SEQUENCE.match(text, position)
            assert match is not None, text[position : position + 20]
            position = match.end()
            self._take(*match.groups())

    def _take(self, parameters: str | None, command: str | None, control: str | None, printed: str | None) -> None:
        if printed is not None:
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + printed + line[self.column + len(printed) :]
            self.column += len(printed)
            self.widest = max(self.widest, self.column)
            self.last_lines.append(self.lines[self.row])
        elif control == "\r":
            self.column = 0
        elif control == "\n":
            self.row += 1
            self.lines += [""] * (self.row + 1 - len(self.lines))
        elif command == "K":
            assert parameters == "2"
            self.lines[self.row] = ""
        elif command == "A":
            self.row -= int(parameters or 1)
        elif command in ("h", "l"):
            assert parameters == "?25"
            self.cursor_visible = command == "h"
        else:
            assert command == "m", (parameters, command)


def run_on_terminal(
    command: Sequence[str | Path],
    cwd: Path,
    width: int,
    environment: Mapping[str, str] | None = None,
    stderr: int | None = None,
) -> tuple[int, Screen]:
    """The exit code, and what a terminal of `width` columns shows; `stderr`: where that goes instead."""
    # A size that a test runner has put there would stand for that of the terminal.
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, "TERM": "xterm-256color", **(environment or {})},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs if stderr is None else stderr,
        start_new_session=True,
    )
    os.close(theirs)
    written = b""
    try:
        while read := os.read(ours, 1 << 16):
            written += read
    except OSError:  # how Linux says that nobody has the other end any more
        pass
    os.close(ours)
    screen = Screen()
    screen.feed(written.decode())
    return process.wait(), screen
