"""Writes a checkpoint in the background: copy to the host, files, checksums, index, commit.

The step that saves waits for the copy of this rank's state to the host. A process then writes and checksums this rank's
files, and lists the pieces in them. When the writers of all ranks have finished, which `poll` checks between steps,
rank 0 makes the index from these lists and commits. A failed write raises its own error there, and the previous
checkpoint stays the latest.
"""

import heapq
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.checkpoint.live import LiveState
from megatron_fp8.checkpoint.manifest import CheckpointError, Manifest, syncing, write_atomically, write_sums
from megatron_fp8.checkpoint.plain_index import INDEX
from megatron_fp8.checkpoint.rank_io import all_or_none, on_rank_0
from megatron_fp8.checkpoint.tensor_files import NewPiece, WrittenPiece, write_index, write_pieces
from megatron_fp8.checkpoint.writer_process import WriterProcess

# One thread neither saturates a disk nor checksums as fast as a disk writes.
_FILES_PER_RANK = 2
_LISTS_PREFIX = ".pieces-"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint.

    `hold_up_seconds`: how long training waited for it; `seconds`: from the start to the commit.
    """

    path: Path
    iteration: int
    num_bytes: int
    hold_up_seconds: float
    seconds: float


@dataclass(frozen=True)
class _Pending:
    """A write in progress, or why its process could not be started."""

    manifest: Manifest
    writer: WriterProcess | OSError
    started: float
    hold_up_seconds: float


class CheckpointWriter:
    """Writes checkpoints of `live` to `directory`, one at a time; all ranks call the same methods."""

    def __init__(self, directory: CheckpointDirectory, live: LiveState) -> None:
        self._directory = directory
        self._live = live
        self._pending: _Pending | None = None

    def start(self, manifest: Manifest, own: Mapping[str, Tensor] | None = None) -> None:
        """Copy the state, and this rank's `own` tensors, and start writing them. Collective.

        Raises CheckpointError if the directory cannot be made. One write at a time: call `wait` first.
        """
        if self._pending is not None:
            raise RuntimeError("a checkpoint is still being written")
        started = time.monotonic()
        path = self._directory.incomplete(manifest.iteration)
        on_rank_0(lambda: self._directory.begin(manifest.iteration))
        copies = [piece for content in self._live.contents(own or {}) if content.is_mine for piece in content.pieces()]
        rank = torch.distributed.get_rank()
        writer: WriterProcess | OSError
        try:
            writer = WriterProcess(partial(write_part, path, rank, copies))
        except OSError as error:
            # Reported to all ranks by `wait`, with the errors of other writers.
            writer = error
        self._pending = _Pending(manifest, writer, started, time.monotonic() - started)

    def poll(self) -> SavedCheckpoint | None:
        """The checkpoint that was finished since the last call, or None. Collective while one is being written."""
        if self._pending is None:
            return None
        writer = self._pending.writer
        is_running = isinstance(writer, WriterProcess) and writer.is_running()
        running = torch.tensor([is_running], dtype=torch.int32, device=self._live.device)
        torch.distributed.all_reduce(running)
        return None if running.item() else self.wait()

    def wait(self) -> SavedCheckpoint | None:
        """As `poll`, after waiting for the write to end."""
        pending = self._pending
        if pending is None:
            return None
        begun = time.monotonic()
        self._pending = None
        iteration = pending.manifest.iteration
        try:
            with all_or_none():
                if isinstance(pending.writer, OSError):
                    raise pending.writer
                if (reason := pending.writer.wait()) is not None:
                    raise CheckpointError(reason)
        except CheckpointError as error:
            # torch's writer may hide the system's error behind "iostream error".
            free = f"{shutil.disk_usage(self._directory.root).free / 1e6:,.1f} MB free on its disk"
            raise CheckpointError(
                f"the checkpoint of iteration {iteration} could not be written: {error} ({free}). "
                f"The latest checkpoint is that of iteration {self._directory.latest()}"
            ) from error
        on_rank_0(lambda: self._commit(pending.manifest))
        now = time.monotonic()
        return SavedCheckpoint(
            self._directory.path(iteration),
            iteration,
            self._directory.manifest(iteration).num_bytes,
            pending.hold_up_seconds + now - begun,
            now - pending.started,
        )

    def _commit(self, manifest: Manifest) -> None:
        incomplete = self._directory.incomplete(manifest.iteration)
        write_index(incomplete, list(_listed_pieces(incomplete)))
        write_sums(incomplete, -1, [INDEX])
        self._directory.commit(manifest)


def write_part(directory: Path, rank: int, copies: Sequence[NewPiece]) -> None:
    """Write a rank's pieces to files, checksum these, and list the pieces. Raises OSError."""
    paths = [directory / f"__{rank}_{number}.distcp" for number in range(_FILES_PER_RANK)]
    shares = [(path, share) for path, share in zip(paths, _shares(copies, len(paths)), strict=True) if share]
    with ThreadPoolExecutor(_FILES_PER_RANK) as pool:
        written = [new for file in pool.map(lambda share: _write_file(*share), shares) for new in file]
    write_atomically(directory / f"{_LISTS_PREFIX}{rank:06d}.json", json.dumps([asdict(new) for new in written]))
    write_sums(directory, rank, [path.name for path, _ in shares])


def _write_file(path: Path, pieces: Sequence[NewPiece]) -> list[WrittenPiece]:
    # `write_sums` syncs the rest while it checksums the file.
    with syncing(path):
        return write_pieces(path, pieces)


def _shares(pieces: Sequence[NewPiece], number: int) -> list[list[NewPiece]]:
    """Split `pieces` into `number` parts of about the same size."""
    parts: list[list[NewPiece]] = [[] for _ in range(number)]
    smallest = [(0, part) for part in range(number)]
    for piece in sorted(pieces, key=lambda piece: -piece.values.nbytes):
        num_bytes, part = smallest[0]
        parts[part].append(piece)
        heapq.heapreplace(smallest, (num_bytes + piece.values.nbytes, part))
    return parts


def _listed_pieces(directory: Path) -> Iterator[WrittenPiece]:
    """The pieces of all ranks; removes the lists, which the index replaces."""
    for path in sorted(directory.glob(f"{_LISTS_PREFIX}*.json")):
        yield from TypeAdapter(list[WrittenPiece]).validate_json(path.read_bytes())
        path.unlink()
