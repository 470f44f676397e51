"""Manages a run's directory of checkpoints: names, commit, which is the latest, which are removed.

    checkpoints/
      iter_0000100/               a checkpoint: torch's files and our manifest
      .iter_0000200.incomplete/   being written, or left behind by a killed job
      iter_0000300.abandoned/     set aside when the run resumed from an earlier one
      latest_checkpointed_iteration.txt

A checkpoint is written under its hidden name, synced, given its manifest, renamed, and only then recorded as the
latest: whenever a job is killed, the latest one is intact. A lock on the manifest keeps a checkpoint that one job reads
from being removed by another: a run that trains removes its older checkpoints, and reading one can take minutes.
Imports no torch.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from megatron_fp8.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    find_corruption,
    gathered_sums,
    read_manifest,
    remove_sums,
    sync,
    write_atomically,
    write_manifest,
)
from megatron_fp8.config.paths import open_file

# In a run's directory.
CHECKPOINTS = "checkpoints"
TRACKER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,18})", re.ASCII)
_ITERATION = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True)
class CheckpointDirectory:
    """The directory of a run's checkpoints; it need not exist yet."""

    root: Path

    def path(self, iteration: int) -> Path:
        """Path of the checkpoint of an iteration."""
        return self.root / f"iter_{iteration:07d}"

    def iteration(self, path: Path) -> int | None:
        """The iteration in a path's name; None for a checkpoint under another name."""
        match = _NAME.fullmatch(path.name)
        return int(match.group(1)) if match else None

    def begin(self, iteration: int) -> Path:
        """Make an empty directory for writing a checkpoint; called by one rank, before the others write.

        Leftovers of a killed job are removed.
        """
        path = self.incomplete(iteration)
        _remove(path)
        path.mkdir(parents=True)
        return path

    def incomplete(self, iteration: int) -> Path:
        """Path under which the checkpoint of an iteration is written."""
        return self.root / f".iter_{iteration:07d}.incomplete"

    def commit(self, manifest: Manifest) -> Path:
        """Turn what was written for the manifest's iteration into a checkpoint, and the latest; called by one rank.

        Every rank has written its files and their checksums. An existing checkpoint of the same iteration is replaced.
        Raises CheckpointError, and leaves the latest one as it was, if files are missing.
        """
        incomplete, path = self.incomplete(manifest.iteration), self.path(manifest.iteration)
        write_manifest(incomplete, replace(manifest, files=gathered_sums(incomplete)))
        remove_sums(incomplete)
        sync(incomplete)
        if os.path.lexists(path):
            # Moved out of the way under a name that nobody loads; until then the tracker must not name it.
            older = self.newest_intact(before=manifest.iteration, contents=False)
            if older is not None:
                write_atomically(self.root / TRACKER, f"{older}\n")
            old = self.root / f".{path.name}.replaced"
            _remove(old)
            path.rename(old)
            incomplete.rename(path)
            _remove(old)
        else:
            incomplete.rename(path)
        sync(self.root)
        write_atomically(self.root / TRACKER, f"{manifest.iteration}\n")
        return path

    def iterations(self) -> list[int]:
        """Iterations that have a checkpoint, intact or corrupt, oldest first."""
        if not self.root.is_dir():
            return []
        found = (self.iteration(path) for path in self.root.iterdir() if path.is_dir())
        return sorted(iteration for iteration in found if iteration is not None)

    def latest(self) -> int | None:
        """The iteration that the tracker names; None without a tracker. CheckpointError for an unreadable tracker.

        A run that is training may record a newer one and remove this one in between: then the newer one is returned.
        """
        named = self._tracked()
        while named is not None and not self.path(named).is_dir() and named != (newer := self._tracked()):
            named = newer
        return named

    def _tracked(self) -> int | None:
        path = self.root / TRACKER
        try:
            with open_file(path) as file:
                text = file.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not _ITERATION.fullmatch(text):
            raise CheckpointError(f"{path} contains {text!r}, not an iteration; write one of {self.iterations()} to it")
        return int(text)

    def newest_intact(self, before: int | None = None, contents: bool = True) -> int | None:
        """The newest iteration (below `before`) with an intact checkpoint, or None."""
        for iteration in reversed(self.iterations()):
            if (before is None or iteration < before) and not any(find_corruption(self.path(iteration), contents)):
                return iteration
        return None

    def manifest(self, iteration: int) -> Manifest:
        """The manifest of the checkpoint of an iteration."""
        return read_manifest(self.path(iteration))

    def prune(self, keep_last: int | None, retain_interval: int | None) -> list[int]:
        """Remove all but the newest `keep_last` checkpoints and those of multiples of `retain_interval`; returns which.

        `keep_last` None: keep all. The latest one and any newer one are always kept, and so is one that a job is
        reading.
        """
        if keep_last is None:
            return []
        removed = []
        for iteration in self.iterations()[: -max(keep_last, 1)]:
            if iteration == self.latest() or (retain_interval and iteration % retain_interval == 0):
                continue
            with lock_for_removal(self.path(iteration)) as free:
                if not free:
                    continue
                # Hidden first, so that a half removed one is never taken for a checkpoint.
                doomed = self.root / f".iter_{iteration:07d}.removed"
                _remove(doomed)
                self.path(iteration).rename(doomed)
            _remove(doomed)
            removed.append(iteration)
        return removed

    def set_aside(self, after: int) -> list[Path]:
        """Rename the checkpoints after the iteration `after`, from which the run resumes; returns their new paths.

        They stay on the disk as `iter_N.abandoned`, and are neither resumed from nor counted.
        """
        aside = []
        for iteration in self.iterations():
            if iteration > after:
                path = self.root / f"{self.path(iteration).name}.abandoned"
                _remove(path)
                self.path(iteration).rename(path)
                aside.append(path)
        if aside:
            write_atomically(self.root / TRACKER, f"{after}\n")
        return aside

    def sweep(self) -> list[Path]:
        """Remove what killed jobs left half written or half removed. Called by one rank before training starts."""
        suffixes = ("incomplete", "replaced", "removed") if self.root.is_dir() else ()
        left = [path for suffix in suffixes for path in sorted(self.root.glob(f".iter_*.{suffix}"))]
        for path in left:
            _remove(path)
        return left


def _remove(path: Path) -> None:
    """Remove a checkpoint if it exists; of a symbolic link only the link."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def find_directory(path: Path) -> CheckpointDirectory | None:
    """The directory of checkpoints that `path` is, or that is in the run directory `path`; None if there is none."""
    for candidate in (path, path / CHECKPOINTS):
        directory = CheckpointDirectory(candidate)
        if directory.iterations():
            return directory
    return None


@contextmanager
def lock_for_reading(checkpoint: Path) -> Iterator[bool]:
    """Keep the checkpoint from being removed inside; False: it is already gone.

    Prints a warning on file systems without locks.
    """
    file = _opened(checkpoint, os.O_RDONLY)
    if file is None:
        yield checkpoint.is_dir()
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
        except OSError as error:
            what = f"warning: {checkpoint} cannot be locked, and may be removed while it is read: {error}"
            print(what, file=sys.stderr, flush=True)
        yield _is_same(file, checkpoint)


@contextmanager
def locked_choice(choose: Callable[[], Path]) -> Iterator[Path]:
    """The checkpoint that `choose` returns, locked for reading; `choose` is called again if it is already gone."""
    while True:
        checkpoint = choose()
        with lock_for_reading(checkpoint) as is_there:
            if is_there:
                yield checkpoint
                return


@contextmanager
def lock_for_removal(checkpoint: Path) -> Iterator[bool]:
    """Whether the checkpoint may be removed inside; False: a job is reading it."""
    file = _opened(checkpoint, os.O_RDWR)
    if file is None:
        yield True
        return
    with file:
        yield _is_free(file)


def _opened(checkpoint: Path, flags: int) -> IO[bytes] | None:
    """The manifest, or None: a directory without one is not taken for a checkpoint."""
    try:
        return open_file(checkpoint / MANIFEST, flags)
    except OSError:
        return None


def _is_free(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here: the reader has been warned
        return True
    return True


def _is_same(file: IO[bytes], checkpoint: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), (checkpoint / MANIFEST).stat())
    except FileNotFoundError:
        return False
