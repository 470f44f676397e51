"""Jobs that are killed, or whose disk is full, at every file operation of a save: what is left is whole."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.checkpoint.directory import TRACKER, CheckpointDirectory
from megatron_fp8.checkpoint.manifest import find_corruption
from megatron_fp8.checkpoint.resume import choose_start
from tests.checkpoint.training import checkpoint_config, save_on_this_rank
from tests.ranks import RankError, run_on_ranks

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
SMALL = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2}


def save_config(**checkpoint: Any):
    return checkpoint_config(
        model=SMALL, parallel={}, training={"eval_iters": 0}, checkpoint={"async_save": False, **checkpoint}
    )


class AtOperation:
    """Does something to the operation on files below `root` that has this number, in whatever process of the job.

    Operations are counted from 1: a file opened to be written, a rename, a removal, a directory made or removed.
    """

    def __init__(self, root: Path, number: int, action) -> None:
        self.root, self.number, self.action = str(root), number, action
        self.count = multiprocessing.get_context("fork").Value("i", 0)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._counts(event, arguments):
            return
        with self.count.get_lock():
            self.count.value += 1
            number = self.count.value
        if number == self.number:
            self.action()

    def _counts(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            path, _, flags = arguments
            return isinstance(path, str) and path.startswith(self.root) and bool(flags & (os.O_WRONLY | os.O_RDWR))
        # Removal of a tree names files relative to an open directory.
        return event in CHANGES and (str(arguments[0]).startswith(self.root) or not Path(arguments[0]).is_absolute())


def kill_the_job() -> None:
    os.killpg(0, signal.SIGKILL)


def save_and_be_killed(config, root: Path, iterations: list[int], number: int) -> int:
    """The number of operations, where that one did not come."""
    os.setsid()
    hook = AtOperation(root, number, kill_the_job)
    sys.addaudithook(hook)
    assert save_on_this_rank(config, root, iterations) == [""] * len(iterations)
    return hook.count.value


@pytest.mark.parametrize(
    "existing", [pytest.param([1], marks=pytest.mark.slow, id="new"), pytest.param([1, 2], id="replaced")]
)
def test_a_job_killed_at_any_operation_leaves_a_whole_latest_checkpoint(existing: list[int], tmp_path: Path) -> None:
    """`replaced`: there is a checkpoint of the same iteration, as after a resume from an older one."""
    config = save_config(keep_last=1)
    (raised,) = run_on_ranks(1, save_on_this_rank, save_config(), tmp_path / "before", existing)
    assert raised == [""] * len(existing)
    shutil.copytree(tmp_path / "before", tmp_path / "undisturbed")
    (num_operations,) = run_on_ranks(1, save_and_be_killed, config, tmp_path / "undisturbed", [2], 0)
    assert num_operations > 10
    seen = set()
    for number in range(1, num_operations + 1):
        root = tmp_path / f"killed{number}"
        shutil.copytree(tmp_path / "before", root)
        with pytest.raises(RankError, match="ended without a result"):
            run_on_ranks(1, save_and_be_killed, config, root, [2], number)
        directory = CheckpointDirectory(root)
        latest = directory.latest()
        assert latest is not None
        assert list(find_corruption(directory.path(latest))) == [], f"killed at operation {number}"
        assert directory.manifest(latest).counters["iteration"] == latest
        start = choose_start(save_config(load=str(root)), None)
        assert start.checkpoint == directory.path(latest)
        seen.add(latest)
        directory.sweep()
        # Only whole checkpoints and the tracker are left, perhaps a tracker that was being written.
        left = {path.name for path in root.iterdir()} - {f".{TRACKER}.tmp"}
        assert left == {TRACKER, *(f"iter_{iteration:07d}" for iteration in directory.iterations())}
        assert all(not list(find_corruption(directory.path(iteration))) for iteration in directory.iterations())
        shutil.rmtree(root)
    assert seen == {1, 2}


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_without_space(config, root: Path, iterations: range) -> tuple[list[str], list[tuple[int | None, list[str]]]]:
    """Save iteration k with no space for its k-th operation. (errors; latest before each, and its damage)."""
    hook = AtOperation(root, 0, no_space)
    directory = CheckpointDirectory(root)
    seen: list[tuple[int | None, list[str]]] = []

    def look_and_fill(iteration: int) -> None:
        latest = directory.latest()
        seen.append((latest, list(find_corruption(directory.path(latest))) if latest is not None else []))
        hook.count.value, hook.number = 0, iteration

    sys.addaudithook(hook)
    return save_on_this_rank(config, root, iterations, look_and_fill), seen


def test_a_full_disk_at_any_operation_is_an_error_and_the_latest_checkpoint_stays(tmp_path: Path) -> None:
    """The very first file, those of the writer, the index, the manifest, the tracker: iteration k meets the k-th."""
    ((errors, seen),) = run_on_ranks(1, save_without_space, save_config(), tmp_path, range(1, 40))
    assert sum(error != "" for error in errors) > 8
    assert errors[-3:] == ["", "", ""]
    assert all("No space left on device" in error for error in errors if error)
    latest = None
    for error, (before, problems), iteration in zip(errors, seen[1:], range(1, 40), strict=False):
        assert problems == []
        # A full disk after the commit leaves the new one whole; before it, the one before.
        assert before == iteration or (error and before == latest)
        latest = before


def save_larger_than_allowed(config, root: Path) -> list[str]:
    def limit(iteration: int) -> None:
        if iteration == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    return save_on_this_rank(config, root, [1, 2], limit)


def test_a_write_that_the_system_refuses_is_the_error_of_every_rank(tmp_path: Path) -> None:
    """The limit on file sizes is met in the midst of a file, as a full disk is."""
    raised = run_on_ranks(2, save_larger_than_allowed, save_config(), tmp_path)
    assert [errors[0] for errors in raised] == ["", ""]
    for errors in raised:
        assert "iteration 2 could not be written: rank 0" in errors[1]
        assert "File too large" in errors[1]
        assert "The latest checkpoint is that of iteration 1" in errors[1]
    assert CheckpointDirectory(tmp_path).newest_intact() == CheckpointDirectory(tmp_path).latest() == 1


def save_with_writer_killed(config, root: Path) -> list[str]:
    import torch

    from megatron_fp8.checkpoint import save

    trainer = os.getpid()
    write = save.write_part

    def die(*arguments: Any, **keywords: Any) -> None:
        assert os.getpid() != trainer
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_second(iteration: int) -> None:
        mine = torch.distributed.get_rank() == 1 and iteration == 2
        save.write_part = die if mine else write

    return save_on_this_rank(config, root, [1, 2, 3], kill_second)


def test_a_writer_that_is_killed_is_an_error_and_not_waited_for(tmp_path: Path) -> None:
    raised = run_on_ranks(2, save_with_writer_killed, save_config(), tmp_path, timeout_seconds=100)
    assert [errors[0] for errors in raised] == ["", ""]
    assert all("iteration 2 could not be written: rank 1" in errors[1] for errors in raised)
    assert all("The latest checkpoint is that of iteration 1" in errors[1] for errors in raised)
    # The next save is as any other.
    assert [errors[2] for errors in raised] == ["", ""]
    directory = CheckpointDirectory(tmp_path)
    assert directory.iterations() == [1, 3]
    assert directory.newest_intact() == directory.latest() == 3
