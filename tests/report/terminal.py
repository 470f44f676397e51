"""A program on a terminal of its own, and what that terminal shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyte

_MOST_ROWS = 500


@dataclass(frozen=True)
class Screen:
    """`lines`: of the terminal; `last_lines`: the line with the cursor, each time before the cursor left it."""

    lines: list[str]
    last_lines: list[str]
    cursor_visible: bool


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
    return process.wait(), show(written.decode(), width)


def show(text: str, width: int) -> Screen:
    """What a terminal that is as high as need be shows of a program's output."""
    screen = pyte.Screen(width, _MOST_ROWS)
    stream = pyte.Stream(screen)
    last_lines = []
    for piece in re.split(r"(?=[\r\n])", text):
        stream.feed(piece)
        last_lines.append(screen.display[screen.cursor.y].rstrip())
    lines = [line.rstrip() for line in screen.display]
    assert not lines[-1], "the output is longer than the screen"
    return Screen(lines, last_lines, not screen.cursor.hidden)
