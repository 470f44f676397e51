"""Owns that a checkpoint which one job reads is not removed by another: a lock of the system on its manifest.

A run that writes on removes its older checkpoints; a new run that starts from one of them may take minutes to read it.
Imports no torch; must not know who reads or removes.
"""

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megatron_fp8.checkpoint.manifest import MANIFEST
from megatron_fp8.config.paths import open_file


@contextmanager
def kept(checkpoint: Path) -> Iterator[bool]:
    """Nobody removes the checkpoint while this is entered, or until the process ends; False: it is gone already.

    Says so, and goes on, where the disk has no locks.
    """
    file = _opened(checkpoint, os.O_RDONLY)
    if file is None:
        yield checkpoint.is_dir()
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
        except OSError as error:
            what = f"{checkpoint} cannot be kept from being removed while it is read"
            print(f"warning: {what}: {error}", file=sys.stderr, flush=True)
        yield _is_still(file, checkpoint)


@contextmanager
def kept_choice(choose: Callable[[], Path]) -> Iterator[Path]:
    """The checkpoint that `choose` names, kept while this is entered; where it is gone already it is asked again."""
    while True:
        checkpoint = choose()
        with kept(checkpoint) as is_there:
            if is_there:
                yield checkpoint
                return


@contextmanager
def to_be_removed(checkpoint: Path) -> Iterator[bool]:
    """Whether the checkpoint may be removed while this is entered; False: somebody reads it."""
    file = _opened(checkpoint, os.O_RDWR)
    if file is None:
        yield True
        return
    with file:
        yield _is_free(file)


def _opened(checkpoint: Path, flags: int) -> IO[bytes] | None:
    """The manifest; None without one that can be opened, so that nobody can take the directory for a checkpoint."""
    try:
        return open_file(checkpoint / MANIFEST, flags)
    except OSError:
        return None


def _is_free(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a disk without locks: who reads has been told
        return True
    return True


def _is_still(file: IO[bytes], checkpoint: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), (checkpoint / MANIFEST).stat())
    except FileNotFoundError:
        return False
