"""Owns writing a checkpoint in the background: the copy, Megatron's writer process, sums, the commit.

The step that saves waits for the copy of this rank's state. A process then writes and sums the files; when all ranks'
have ended, which `poll` looks at between steps, rank 0 commits. A write that failed raises its own error there, and
the checkpoint before it stays the latest. Must not know when to save.
"""

import os
import queue
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.checkpoint.live import LiveState
from megatron_fp8.checkpoint.mailbox import use_mailbox
from megatron_fp8.checkpoint.manifest import CheckpointError, Manifest, flushed_meanwhile, write_sums
from megatron_fp8.checkpoint.orphan import die_with
from megatron_fp8.checkpoint.together import on_rank_0


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was committed.

    `hold_up_seconds`: how long training waited for it; `seconds`: from the start to the commit.
    """

    path: Path
    iteration: int
    num_bytes: int
    hold_up_seconds: float
    seconds: float


class CheckpointWriter:
    """Writes checkpoints of `live` into `directory`, one at a time; every rank makes one and calls the same methods."""

    def __init__(self, directory: CheckpointDirectory, live: LiveState) -> None:
        self._directory = directory
        self._live = live
        self._queue = AsyncCallsQueue()
        self._pending: _Pending | None = None
        use_mailbox()

    def start(self, manifest: Manifest, own: Mapping[str, Tensor] | None = None) -> None:
        """Copy the state and begin to write it, with tensors that are this rank's `own`. Collective.

        Raises CheckpointError where nothing can be written. Only one write at a time: `wait` comes before.
        """
        if self._pending is not None:
            raise RuntimeError("a checkpoint is still being written")
        started = time.monotonic()
        path = self._directory.incomplete(manifest.iteration)
        on_rank_0(lambda: self._directory.begin(manifest.iteration), self._live.device)
        try:
            request = dist_checkpointing.save(
                self._live.tensors_to_save(own or {}),
                str(path),
                async_sharded_save=True,
                async_strategy="mcore",
                # What every rank writes follows from the layout, which tests check; this would gather it all each time.
                validate_access_integrity=False,
            )
        except (OSError, RuntimeError) as error:  # torch's own writer of files raises the latter
            raise CheckpointError(f"{path} cannot be written: {error}{self._space_left()}") from error
        assert request is not None
        self._queue.schedule_async_request(_with_sums(request, path))
        self._pending = _Pending(manifest, started, time.monotonic() - started)

    def poll(self) -> SavedCheckpoint | None:
        """The checkpoint that has become whole since the last call, if any. Collective while one is being written."""
        return self._finish(blocking=False)

    def wait(self) -> SavedCheckpoint | None:
        """As `poll`, after the write has ended."""
        return self._finish(blocking=True)

    def _finish(self, blocking: bool) -> SavedCheckpoint | None:
        pending = self._pending
        if pending is None:
            return None
        begun = time.monotonic()
        try:
            if not self._queue.maybe_finalize_async_calls(blocking):
                return None
        except (CheckpointException, CheckpointingException, RuntimeError, OSError) as error:
            self._pending = None
            raise CheckpointError(
                f"the checkpoint of iteration {pending.manifest.iteration} could not be written: {_reason(error)}"
                f"{self._space_left()}. "
                f"The latest whole one is that of iteration {self._directory.latest()}"
            ) from error
        self._pending = None
        on_rank_0(lambda: self._commit(pending), self._live.device)
        path = self._directory.path(pending.manifest.iteration)
        now = time.monotonic()
        return SavedCheckpoint(
            path,
            pending.manifest.iteration,
            self._directory.manifest(pending.manifest.iteration).num_bytes,
            pending.hold_up_seconds + now - begun,
            now - pending.started,
        )

    def _space_left(self) -> str:
        """Of the disk, for an error: torch's writers may hide what the system said behind "iostream error"."""
        free_bytes = shutil.disk_usage(self._directory.root).free
        return f" ({free_bytes / 1e6:,.1f} MB are free on its disk)"

    def _commit(self, pending: "_Pending") -> None:
        incomplete = self._directory.incomplete(pending.manifest.iteration)
        # What Megatron writes itself, on rank 0 and after the writers: the index and its settings.
        written = {path.name for path in incomplete.iterdir() if path.suffix != ".distcp" and path.is_file()}
        write_sums(incomplete, -1, sorted(name for name in written if not name.startswith(".sums-")))
        self._directory.commit(pending.manifest)


@dataclass(frozen=True)
class _Pending:
    manifest: Manifest
    started: float
    hold_up_seconds: float


def _with_sums(request: AsyncRequest, path: Path) -> AsyncRequest:
    """The request whose process sums this rank's files too, when they are written.

    Threads write, where Megatron's process would start further ones: of those, one that is killed is waited for without
    end.
    """
    rank, rank_pid = torch.distributed.get_rank(), os.getpid()

    def write_and_sum(_: int = rank, buckets: Sequence[Any] = (), mailbox: Any = None) -> None:
        assert request.async_fn is None or isinstance(request.async_fn, partial)
        transforms = request.async_fn.args[0] if request.async_fn is not None else []
        try:
            die_with(rank_pid)
            with ThreadPoolExecutor(max(1, len(buckets))) as pool:
                results: Any = dict(pool.map(partial(_write_bucket, transforms), range(len(buckets)), buckets))
            write_sums(path, rank, sorted(file.name for file in path.glob(f"__{rank}_*.distcp")))
        except Exception as error:  # noqa: BLE001 - whatever it is, the rank raises it
            results = error
        if mailbox is not None:
            mailbox.put(results)

    return request._replace(async_fn=write_and_sum)


def _write_bucket(transforms: list[Any], number: int, bucket: Any) -> tuple[int, list[Any]]:
    """Write one file by Megatron's means while the disk takes what is there already; what it holds where.

    Raises what went wrong.
    """
    results: queue.Queue[Any] = queue.Queue()
    counts: queue.Queue[int] = queue.Queue()
    counts.put(number)
    with flushed_meanwhile(Path(bucket[0])):
        # The rest is brought to the disk while the file is summed, in `write_sums`.
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, results, counts, use_fsync=False)
    _, written = results.get_nowait()
    if isinstance(written, Exception):
        raise _system_error(written)
    return number, written


def _system_error(error: Exception) -> Exception:
    """What the system said, which torch covers with a complaint about positions in the file."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError):
            return chain
        chain = chain.__cause__ or chain.__context__
    return error


def _reason(error: BaseException) -> str:
    """What went wrong, in a line.

    Collective over torch's exception, which all ranks get together, but only rank 0 with the reasons.
    """
    if not isinstance(error, CheckpointException):
        return str(error)
    reasons = ["; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())]
    torch.distributed.broadcast_object_list(reasons, src=0)
    return reasons[0]
