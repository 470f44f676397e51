"""A disk that is full for real: a small file system of its own, which is filled, and emptied again.

In a mount namespace of the process, so that nothing is left behind; where that is not permitted, tests are skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.report.record import METRICS, read_records
from tests.checkpoint.training import checkpoint_config, save_on_this_rank
from tests.e2e.conftest import Tiny
from tests.e2e.launch import PRETRAIN, run
from tests.ranks import run_on_ranks

CLONE_NEWNS = 0x00020000
SMALL = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2}
KILOBYTES = 1500


def may_mount() -> bool:
    tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    return tried.returncode == 0


pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not may_mount(), reason="mounting a file system is not permitted here"
)


def mount_small_disk(directory: Path, kilobytes: int) -> None:
    """A file system of its own at `directory`, seen by this process and its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    for command in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(directory)]):
        subprocess.run(["mount", *command], check=True)


def fill(directory: Path) -> Path:
    """A file that takes all that is left."""
    ballast = directory / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


def save_on_a_disk_that_is_full_meanwhile(config: Any, root: Path) -> tuple[list[str], list[int], int | None]:
    """Save iterations 1 to 4, the disk full for 2 and 3. (errors, checkpoints that are left, the latest whole one)."""
    from megatron_fp8.checkpoint.directory import CheckpointDirectory

    mount_small_disk(root, KILOBYTES)

    def fill_or_free(iteration: int) -> None:
        if iteration == 2:
            fill(root)
        elif iteration == 4:
            (root / "ballast").unlink()

    errors = save_on_this_rank(config, root / "checkpoints", [1, 2, 3, 4], fill_or_free)
    directory = CheckpointDirectory(root / "checkpoints")
    return errors, directory.iterations(), directory.newest_intact()


def test_a_checkpoint_without_space_is_an_error_the_last_one_stays_and_with_space_it_is_saved(tmp_path: Path) -> None:
    config = checkpoint_config(model=SMALL, training={"eval_iters": 0}, checkpoint={"async_save": False})
    ((errors, iterations, newest),) = run_on_ranks(1, save_on_a_disk_that_is_full_meanwhile, config, tmp_path)
    assert errors[0] == errors[3] == ""
    for error in errors[1:3]:
        # Torch's writer of the first file knows no more than that it failed.
        assert "No space left on device" in error or "iostream error" in error
        assert "(0.0 MB free on its disk)" in error
    assert iterations == [1, 4]
    assert newest == 4


def record_on_a_disk_that_is_full_meanwhile(root: Path) -> tuple[list[str], list[int]]:
    """What is said of a record of 200 iterations, the disk full from the 50th to the 150th; iterations in the file."""
    from megatron_fp8.report.views import record_sink

    mount_small_disk(root, 256)
    said: list[str] = []
    sink = record_sink(root, said.append)
    for iteration in range(200):
        if iteration == 50:
            ballast = fill(root)
        if iteration == 150:
            ballast.unlink()
        sink.write({"event": "train", "iteration": iteration, "text": "x" * 200})
    sink.close()
    return said, [int(record["iteration"]) for record in read_records(root / METRICS)]


def test_a_record_without_space_is_said_once_and_written_when_there_is_space(tmp_path: Path) -> None:
    ((said, iterations),) = run_on_ranks(1, record_on_a_disk_that_is_full_meanwhile, tmp_path)
    assert iterations == list(range(200))
    assert len(said) == 2
    assert "No space left on device" in said[0]
    assert "works again" in said[1]


# A first checkpoint fits, a second one beside it does not; more room, and the run goes on to its end.
SCRIPT = """\
mount -t tmpfs -o size={kilobytes}k none runs
{program} training.eval_iters=0 checkpoint.save_interval=2 checkpoint.async_save=false
echo "ended with $?"
cat runs/tiny/checkpoints/latest_checkpointed_iteration.txt
mount -o remount,size=100m runs
{program} training.eval_iters=0 checkpoint.save_interval=2 checkpoint.async_save=false --resume=auto
echo "ended with $?"
cat runs/tiny/checkpoints/latest_checkpointed_iteration.txt
"""


@pytest.mark.slow
def test_a_run_whose_disk_becomes_full_says_so_and_goes_on_when_there_is_room(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write_config(tmp_path, mode="bf16")
    (tmp_path / "runs").mkdir()
    script = SCRIPT.format(kilobytes=2600, program=f"{sys.executable} {PRETRAIN} tiny.yaml")
    ended = run(["unshare", "-m", "sh", "-c", script], tmp_path, timeout_seconds=400)
    lines = ended.stdout.splitlines()
    first, second = [index for index, line in enumerate(lines) if line.startswith("ended with")]
    assert lines[first : first + 2] == ["ended with 1", "2"], ended.output
    assert lines[second : second + 2] == ["ended with 0", "6"], ended.output
    assert "the checkpoint of iteration 4 could not be written" in ended.stderr
    assert "No space left on device" in ended.stderr
    assert "The latest checkpoint is that of iteration 2" in ended.stderr
