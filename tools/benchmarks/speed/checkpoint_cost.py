"""What checkpoints cost: what a save costs beside `torch.save` of the same bytes, and a load.

One rank. Rounds of all subjects one after another on the same directory, everything brought to the disk (fsync), so
that the ratios are those of one disk under one load.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, BinaryIO

import psutil
import torch

from benchmarks.runs import OurRun, repeated_batch
from benchmarks.speed.measurement import CheckpointCost
from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.checkpoint.manifest import Manifest
from megatron_fp8.config.schema import Config

if TYPE_CHECKING:
    from megatron_fp8.checkpoint.live import LiveState

_POLL_SECONDS = 0.01
_BLOCK_BYTES = 1 << 20


def measure_checkpoints(config: Config, directory: Path, num_rounds: int) -> CheckpointCost:
    """Train a step of `config` on this process, then save and load its state `num_rounds` times."""
    run = OurRun(config, repeated_batch(config))
    try:
        run.step()
        subject = _Subject(run.parts.checkpointer.live, directory)
        saves = [subject.save_round(number) for number in range(1, num_rounds + 1)]
        loads = [subject.load_round(num_rounds) for _ in saves]
        # By itself: looking at memory takes time of its own.
        extra_bytes = subject.extra_bytes(num_rounds + 1)
    finally:
        run.close()
        torch.distributed.destroy_process_group()
    times = {name: median(round_[name] for round_ in rounds) for rounds in (saves, loads) for name in rounds[0]}
    return CheckpointCost(state_bytes=subject.num_bytes, extra_bytes=extra_bytes, **times)


class _Subject:
    def __init__(self, live: LiveState, directory: Path) -> None:
        # It looks for CUDA when imported; the run has prepared that.
        from megatron_fp8.checkpoint.save import CheckpointWriter

        self._live = live
        self._root = directory
        self._plain = directory / "plain.pt"
        self._directory = CheckpointDirectory(directory / "checkpoints")
        self._writer = CheckpointWriter(self._directory, live)
        self._tensors = [piece.values for content in live.contents({}) for piece in content.pieces()]
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)

    def save_round(self, number: int) -> dict[str, float]:
        """Every way to save once."""
        started = time.perf_counter()
        self._writer.start(self._manifest(number))
        hold_up = time.perf_counter() - started
        self._writer.wait()
        save = time.perf_counter() - started
        found = {
            "hold_up": hold_up,
            "save": save,
            "torch_save": _seconds(lambda: _write_synced(self._plain, lambda file: torch.save(self._tensors, file))),
            "write": _seconds(lambda: _write_synced(self._root / "raw", self._write_zeros)),
        }
        self._directory.prune(keep_last=1, retain_interval=None)
        return found

    def load_round(self, number: int) -> dict[str, float]:
        """Every way to load once, from what round `number` of the saves, the last, has written.

        After all saves: memory that loading leaves to the process would make each fork longer.
        """
        counters = self._manifest(number).counters
        return {
            "load": _seconds(lambda: self._live.load(self._directory.path(number), counters)),
            "torch_load": _seconds(lambda: torch.load(self._plain, weights_only=True)),
        }

    def extra_bytes(self, number: int) -> int:
        """Most memory that a save takes beyond that of training."""
        with _PeakMemory() as memory:
            self._writer.start(self._manifest(number))
            self._writer.wait()
        return memory.extra_bytes

    def _manifest(self, number: int) -> Manifest:
        return Manifest(number, "", {}, self._live.scalars(), {})

    def _write_zeros(self, file: BinaryIO) -> None:
        for start in range(0, self.num_bytes, _BLOCK_BYTES):
            file.write(bytes(min(_BLOCK_BYTES, self.num_bytes - start)))


class _PeakMemory:
    """Most memory of this process and its children beyond what they had before; shared pages count once."""

    def __enter__(self) -> _PeakMemory:
        self._process = psutil.Process()
        self._before = self._used()
        self._peak = self._before
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def extra_bytes(self) -> int:
        return self._peak - self._before

    def _watch(self) -> None:
        while not self._done.wait(_POLL_SECONDS):
            self._peak = max(self._peak, self._used())

    def _used(self) -> int:
        total = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        return total


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _write_synced(path: Path, write: Callable[..., object]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
