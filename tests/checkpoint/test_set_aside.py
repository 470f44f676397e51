"""Checkpoints that a run leaves behind when it goes on from an earlier one."""

from __future__ import annotations

from pathlib import Path

from megatron_fp8.checkpoint.directory import CheckpointDirectory, lock_for_reading
from megatron_fp8.checkpoint.manifest import Manifest, write_sums


def commit(directory: CheckpointDirectory, iteration: int, content: str) -> None:
    path = directory.begin(iteration)
    (path / "data").write_text(content, encoding="utf-8")
    write_sums(path, 0, ["data"])
    directory.commit(Manifest(iteration, "", {}, {}, {}))


def test_later_checkpoints_are_kept_but_neither_found_nor_counted(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for iteration in (10, 20, 30):
        commit(directory, iteration, "first")
    aside = directory.set_aside(after=10)
    assert [path.name for path in aside] == ["iter_0000020.abandoned", "iter_0000030.abandoned"]
    assert all((path / "data").read_text(encoding="utf-8") == "first" for path in aside)
    assert directory.iterations() == [10]
    assert directory.latest() == directory.newest_intact() == 10
    commit(directory, 20, "second")
    assert directory.latest() == directory.newest_intact() == 20
    assert directory.prune(keep_last=1, retain_interval=None) == [10]
    assert [path.name for path in directory.set_aside(after=10)] == ["iter_0000020.abandoned"]


def test_nothing_is_set_aside_after_the_latest(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    commit(directory, 10, "only")
    assert directory.set_aside(after=10) == []
    assert directory.latest() == 10


def test_what_another_job_reads_is_removed_only_when_it_has_been_read(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for iteration in (10, 20, 30):
        commit(directory, iteration, "content")
    with lock_for_reading(directory.path(10)) as here, lock_for_reading(directory.path(10)):
        assert here
        assert directory.prune(keep_last=1, retain_interval=None) == [20]
        assert (directory.path(10) / "data").read_text(encoding="utf-8") == "content"
    assert directory.prune(keep_last=1, retain_interval=None) == [10]
    with lock_for_reading(directory.path(10)) as here:
        assert not here
    # A directory that is no checkpoint has nothing to be kept; what is wrong with it is said elsewhere.
    (tmp_path / "damaged").mkdir()
    with lock_for_reading(tmp_path / "damaged") as here:
        assert here
