"""Everything that can stand in the way of a path, and a process for which permissions count even where tests are root.

A root without the two capabilities that pass over permissions is refused by mode 000 as everybody else is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 24, 1, 2


@dataclass(frozen=True)
class Obstacle:
    """`make` puts something into an empty directory and returns a path that cannot be used; `why`: what is said of it.

    `wanted`: "file" or "directory" where it stands in the way of that alone.
    """

    name: str
    make: Callable[[Path], str]
    why: str
    wanted: str = ""

    def __str__(self) -> str:
        return self.name


def _closed_file(place: Path) -> str:
    (place / "closed").write_text("text", encoding="utf-8")
    (place / "closed").chmod(0)
    return str(place / "closed")


def _closed_directory(place: Path) -> str:
    (place / "shut").mkdir()
    (place / "shut").chmod(0)
    return str(place / "shut")


def _below_closed(place: Path) -> str:
    (place / "shut" / "inner").mkdir(parents=True)
    (place / "shut").chmod(0)
    return str(place / "shut" / "inner" / "thing")


def _cycle(place: Path) -> str:
    (place / "one").symlink_to("two")
    (place / "two").symlink_to("one")
    return str(place / "one")


def _dangling(place: Path) -> str:
    (place / "link").symlink_to(place / "gone")
    return str(place / "link")


def _link_into_closed(place: Path) -> str:
    _below_closed(place)
    (place / "link").symlink_to(place / "shut" / "inner")
    return str(place / "link")


def _pipe(place: Path) -> str:
    os.mkfifo(place / "pipe")
    return str(place / "pipe")


def _file(place: Path) -> str:
    (place / "plain").write_text("text", encoding="utf-8")
    return str(place / "plain")


def _directory(place: Path) -> str:
    (place / "folder").mkdir()
    return str(place / "folder")


def _below_file(place: Path) -> str:
    return f"{_file(place)}/below"


OBSTACLES = [
    Obstacle("closed file", _closed_file, "permission denied on {place}/closed", "file"),
    Obstacle("closed directory", _closed_directory, "permission denied on {place}/shut: its mode is 0000", "directory"),
    Obstacle("closed directory above", _below_closed, "permission denied on {place}/shut: its mode is 0000"),
    Obstacle("long name", lambda place: f"{place}/{'n' * 256}", "bytes, and file systems take 255"),
    Obstacle("long path", lambda place: f"{place}/{'p/' * 2100}", "the path has"),
    Obstacle("NUL", lambda place: f"{place}/a\0b", "no path can hold a NUL character"),
    Obstacle("dangling link", _dangling, "{place}/link is a link, and no such file or directory as"),
    Obstacle("links in a circle", _cycle, "is a link that leads back to itself"),
    Obstacle("link into a closed directory", _link_into_closed, "is a link, and permission denied on {place}/shut"),
    Obstacle("pipe", _pipe, "is a pipe, not"),
    Obstacle("device", lambda place: "/dev/null", "/dev/null is a device, not"),
    Obstacle("file", _file, "{place}/plain is a file, not a directory", "directory"),
    Obstacle("directory", _directory, "is a directory, not a file", "file"),
    Obstacle("below a file", _below_file, "{place}/plain is a file, not a directory"),
]


def drop_privileges() -> None:
    """Give up passing over permissions, for what is executed next; called between fork and exec.

    Raises OSError where the kernel refuses.
    """
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_CAPBSET_DROP)")
