"""Owns a run's directory of checkpoints: names, the commit of a new one, which one is the latest, which ones go.

    checkpoints/
      iter_0000100/          a whole checkpoint: torch's files and our manifest
      .iter_0000200.incomplete/   being written, or left by a job that was killed
      iter_0000300.abandoned/     a later one of a run that went on from an earlier one
      latest_checkpointed_iteration.txt

A checkpoint is written under its hidden name, synced, given its manifest, renamed, and only then named as the latest:
whatever moment a job is killed at, the latest one is whole. Imports no torch; must not know what checkpoints hold.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_fp8.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    damage,
    gathered_sums,
    read_manifest,
    remove_sums,
    sync,
    write_manifest,
    write_whole,
)
from megatron_fp8.checkpoint.reading import to_be_removed
from megatron_fp8.config.paths import open_file

TRACKER = "latest_checkpointed_iteration.txt"
_WHOLE = re.compile(r"iter_(\d{7,18})", re.ASCII)
_ITERATION = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True)
class CheckpointDirectory:
    """The directory that a run's checkpoints lie in; it need not exist yet."""

    root: Path

    def path(self, iteration: int) -> Path:
        """Where the whole checkpoint of an iteration lies."""
        return self.root / f"iter_{iteration:07d}"

    def iteration(self, path: Path) -> int | None:
        """The iteration that a path's name says; None for a checkpoint under another name."""
        match = _WHOLE.fullmatch(path.name)
        return int(match.group(1)) if match else None

    def begin(self, iteration: int) -> Path:
        """An empty directory to write the checkpoint of an iteration into; called by one rank, before the others write.

        What a killed job left of an earlier try is removed.
        """
        path = self.incomplete(iteration)
        _remove(path)
        path.mkdir(parents=True)
        return path

    def incomplete(self, iteration: int) -> Path:
        """Where the checkpoint of an iteration is written."""
        return self.root / f".iter_{iteration:07d}.incomplete"

    def commit(self, manifest: Manifest) -> Path:
        """Make what was written for the manifest's iteration a whole checkpoint, and the latest; called by one rank.

        Every rank must have written its files and their sums. An older checkpoint of the same iteration is replaced.
        Raises CheckpointError, and leaves the latest one as it was, where files are missing.
        """
        incomplete, path = self.incomplete(manifest.iteration), self.path(manifest.iteration)
        write_manifest(incomplete, replace(manifest, files=gathered_sums(incomplete)))
        remove_sums(incomplete)
        sync(incomplete)
        if os.path.lexists(path):
            # Out of the way under a name that nobody loads; the tracker must not name it meanwhile.
            older = self.newest_whole(before=manifest.iteration, contents=False)
            if older is not None:
                write_whole(self.root / TRACKER, f"{older}\n")
            old = self.root / f".{path.name}.replaced"
            _remove(old)
            path.rename(old)
            incomplete.rename(path)
            _remove(old)
        else:
            incomplete.rename(path)
        sync(self.root)
        write_whole(self.root / TRACKER, f"{manifest.iteration}\n")
        return path

    def iterations(self) -> list[int]:
        """Iterations that have a checkpoint, whole or damaged later, oldest first."""
        if not self.root.is_dir():
            return []
        found = (self.iteration(path) for path in self.root.iterdir() if path.is_dir())
        return sorted(iteration for iteration in found if iteration is not None)

    def latest(self) -> int | None:
        """The iteration that the tracker names; None without a tracker. CheckpointError for a tracker that is wrong.

        A run that goes on names a newer one, and may have removed this one meanwhile: then that is the answer.
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
            raise CheckpointError(f"{path} says {text!r}, not an iteration; write one of {self.iterations()} into it")
        return int(text)

    def newest_whole(self, before: int | None = None, contents: bool = True) -> int | None:
        """The newest iteration (below `before`) whose checkpoint is whole; None if there is none."""
        for iteration in reversed(self.iterations()):
            if (before is None or iteration < before) and not any(damage(self.path(iteration), contents)):
                return iteration
        return None

    def manifest(self, iteration: int) -> Manifest:
        """The manifest of an iteration's checkpoint."""
        return read_manifest(self.path(iteration))

    def prune(self, keep_last: int | None, retain_interval: int | None) -> list[int]:
        """Remove checkpoints but the newest `keep_last` and those of multiples of `retain_interval`; returns which.

        `keep_last` None: all stay. The latest whole one stays always, and so does what is newer. One that another job
        reads stays for this time.
        """
        if keep_last is None:
            return []
        removed = []
        for iteration in self.iterations()[: -max(keep_last, 1)]:
            if iteration == self.latest() or (retain_interval and iteration % retain_interval == 0):
                continue
            with to_be_removed(self.path(iteration)) as free:
                if not free:
                    continue
                # First out of sight, so that a half removed one is never taken for a checkpoint.
                doomed = self.root / f".iter_{iteration:07d}.removed"
                _remove(doomed)
                self.path(iteration).rename(doomed)
            _remove(doomed)
            removed.append(iteration)
        return removed

    def set_aside(self, after: int) -> list[Path]:
        """Rename checkpoints of later iterations, which a run that goes on from `after` leaves behind; returns where.

        They stay on the disk as `iter_N.abandoned`, and are neither resumed from nor counted any more.
        """
        aside = []
        for iteration in self.iterations():
            if iteration > after:
                path = self.root / f"{self.path(iteration).name}.abandoned"
                _remove(path)
                self.path(iteration).rename(path)
                aside.append(path)
        if aside:
            write_whole(self.root / TRACKER, f"{after}\n")
        return aside

    def sweep(self) -> list[Path]:
        """Remove what killed jobs left: half written, half removed. Called by one rank before training starts."""
        left = list(self._leftovers())
        for path in left:
            _remove(path)
        return left

    def _leftovers(self) -> Iterator[Path]:
        if self.root.is_dir():
            for suffix in ("incomplete", "replaced", "removed"):
                yield from sorted(self.root.glob(f".iter_*.{suffix}"))


def _remove(path: Path) -> None:
    """Remove a checkpoint if it is there; of a link to one on another disk the link, and nothing that it leads to."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
