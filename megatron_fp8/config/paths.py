"""Explains why the system refuses a path: the one place where an OSError becomes a reason.

Refusals are found before anything is written or a run is created; a pipe is never opened, since that would wait for a
writer. Imports no torch.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095
_MAX_LINKS = 40
_MAX_CHARS_SHOWN = 60
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def why_refused(path: str | os.PathLike[str], error: OSError | ValueError) -> str:
    """Why `path` could not be opened, listed or looked at, given the error raised: names the part of it at fault."""
    if isinstance(error, ValueError):
        return "a path cannot contain a NUL character" if "\0" in os.fspath(path) else f"not a valid path: {error}"
    place = Path(path).absolute()
    too_long = _too_long(place) if error.errno == errno.ENAMETOOLONG else None
    return too_long or _blamed(place, error, _MAX_LINKS)


def why_unreadable(path: str | os.PathLike[str], wanted: tuple[str, ...] = ("a file",)) -> str | None:
    """Why this user cannot read what is `wanted`, "a file" or "a directory", at `path`; None: it can be read.

    A missing file is a reason too.
    """
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError) as error:
        return why_refused(path, error)
    if _kind(mode) not in wanted:
        return f"{shown(path)} is {_kind(mode)}, not {' or '.join(wanted)}"
    return None if _may(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)) else _denied(Path(path))


def open_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> IO[bytes]:
    """A file's bytes. OSError where it cannot be opened, or is anything but a file: a pipe would be waited for.

    `flags`: the system's, how to open it; O_RDWR also writes.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a file", os.fspath(path))
    return os.fdopen(descriptor, "r+b" if flags & os.O_RDWR else "rb")


def why_unwritable(path: str | os.PathLike[str]) -> str | None:
    """Why this user can neither write into the directory `path` nor create it; None: one of them. Creates nothing."""
    place = Path(path).absolute()
    try:
        if reason := _too_long(place):
            return reason
        while True:
            try:
                mode = place.stat().st_mode
                break
            except FileNotFoundError as error:
                if os.path.lexists(place):  # a link to nowhere
                    return why_refused(place, error)
                place = place.parent
    except (OSError, ValueError) as error:
        return why_refused(place, error)
    if not stat.S_ISDIR(mode):
        return f"{shown(place)} is {_kind(mode)}, not a directory"
    return None if _may(place, os.W_OK | os.X_OK) else _denied(place)


def is_missing(path: str | os.PathLike[str]) -> bool:
    """Whether nothing has this name; False where the system does not let this user look."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return False


def shown(path: str | os.PathLike[str]) -> str:
    """A path for a message: in one line, cut where it is too long to read."""
    text = os.fspath(path)
    text = text if text.isprintable() else repr(text)[1:-1]
    if len(text) <= 4 * _MAX_CHARS_SHOWN:
        return text
    return f"{text[:_MAX_CHARS_SHOWN]}...{text[-_MAX_CHARS_SHOWN:]}"


def _blamed(path: Path, error: OSError, num_links: int) -> str:
    """What is wrong with the first part of `path` that is refused; follows at most `num_links` more links."""
    for part in (*reversed(path.parents), path):
        try:
            mode = os.lstat(part).st_mode
        except OSError as refused:
            return _of_part(part, refused)
        if not stat.S_ISLNK(mode):
            continue
        try:
            part.stat()
        except OSError as refused:
            if refused.errno == errno.ELOOP or num_links == 0:
                return f"{shown(part)} is a circular symbolic link"
            reason = _blamed(part.parent / part.readlink(), refused, num_links - 1)
            return f"{shown(part)} is a symbolic link, and {reason}"
    return _denied(path) if error.errno in (errno.EACCES, errno.EPERM) else f"{shown(path)}: {error.strerror}"


def _of_part(part: Path, error: OSError) -> str:
    """The same for the part of a path that cannot be looked at, while those before it can."""
    if error.errno == errno.ENOENT:
        return f"no such file or directory: {shown(part)}"
    if error.errno == errno.EACCES:
        return _denied(part.parent)
    if error.errno == errno.ENOTDIR:
        return f"{shown(part.parent)} is {_kind(part.parent.stat().st_mode)}, not a directory"
    if error.errno == errno.ENAMETOOLONG:
        return _too_long(part) or f"{shown(part)}: {error.strerror}"
    return f"{shown(part)}: {error.strerror}"


def _too_long(path: Path) -> str | None:
    for name in path.parts:
        if (num_bytes := len(os.fsencode(name))) > _MAX_NAME_BYTES:
            return f"the name {shown(name)} is {num_bytes} bytes long; file systems allow {_MAX_NAME_BYTES}"
    if (num_bytes := len(os.fsencode(path))) > _MAX_PATH_BYTES:
        return f"the path is {num_bytes:,} bytes long; the system allows {_MAX_PATH_BYTES:,}"
    return None


def _may(path: str | os.PathLike[str], mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _denied(path: Path) -> str:
    found = path.stat()
    if os.statvfs(path).f_flag & os.ST_RDONLY and _may(path, os.R_OK | os.X_OK):
        return f"{shown(path)} is on a file system that is read-only"
    return (
        f"permission denied: {shown(path)} has mode {stat.S_IMODE(found.st_mode):04o} and is owned by user "
        f"{found.st_uid}; this process runs as user {os.geteuid()}"
    )


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something else")
