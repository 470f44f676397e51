"""What a run starts from is held from the choice on: nobody else writes into its directory, nor removes it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.checkpoint.manifest import MANIFEST, Manifest, write_sums
from megatron_fp8.checkpoint.resume import choose_start
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.errors import BadInputError
from megatron_fp8.faults.run_lock import Holds, locked_run
from tests.checkpoint.test_start import make_config


@dataclass
class Removing:
    """Holds, of a run whose owner removes `doomed` just before they are held."""

    directory: CheckpointDirectory
    doomed: list[int]
    held: list[Path] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)

    def run(self, directory: Path) -> None:
        self.runs.append(directory)

    def checkpoint(self, path: Path) -> bool:
        if self.doomed:
            shutil.rmtree(self.directory.path(self.doomed.pop()))
            commit(self.directory, max(self.directory.iterations()) + 30)
        if path.is_dir():
            self.held.append(path)
        return path.is_dir()


def commit(directory: CheckpointDirectory, iteration: int) -> None:
    path = directory.begin(iteration)
    (path / "data").write_text("content", encoding="utf-8")
    write_sums(path, 0, ["data"])
    directory.commit(Manifest(iteration, "", {}, {"consumed_samples": 8 * iteration}, {}))


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    made = CheckpointDirectory(tmp_path / "small" / "checkpoints")
    for iteration in (10, 20, 30):
        commit(made, iteration)
    return made


@pytest.mark.parametrize("inside", ["small", "small/checkpoints"])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_chosen_anew(
    directory: CheckpointDirectory, tmp_path: Path, inside: str
) -> None:
    config = make_config(tmp_path / "other", load=str(tmp_path / inside))
    holds = Removing(directory, [30])
    start = choose_start(config, None, holds)
    assert start.checkpoint == directory.path(50)
    assert start.position.iteration == 50
    assert holds.held == [directory.path(50)]
    assert holds.runs == []


@pytest.mark.parametrize("settings", [{"ckpt_step": 20}, {"inside": "iter_0000020"}])
def test_one_that_was_asked_for_by_name_is_said_to_be_gone(
    directory: CheckpointDirectory, tmp_path: Path, settings: dict[str, object]
) -> None:
    path = directory.root / str(settings.get("inside", ""))
    config = make_config(tmp_path / "other", load=str(path), ckpt_step=settings.get("ckpt_step"))
    with pytest.raises(ConfigError, match=r"no checkpoint of iteration 20|no such directory"):
        choose_start(config, None, Removing(directory, [20]))


def test_what_a_new_run_reads_stays_until_it_lets_go(directory: CheckpointDirectory, tmp_path: Path) -> None:
    holds = Holds()
    start = choose_start(make_config(tmp_path / "other", load=str(tmp_path / "small")), None, holds)
    assert start.checkpoint == directory.path(30)
    for iteration in (40, 50):
        commit(directory, iteration)
    assert directory.prune(keep_last=1, retain_interval=None) == [10, 20, 40]
    holds.let_checkpoint_go()
    assert directory.prune(keep_last=1, retain_interval=None) == [30]


@pytest.mark.parametrize("resume", ["auto", "latest"])
def test_the_choice_waits_for_the_job_that_writes_and_looking_does_not(
    directory: CheckpointDirectory, tmp_path: Path, resume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path)
    with locked_run(tmp_path / "small"):
        assert choose_start(config, resume).checkpoint == directory.path(30)
        with pytest.raises(BadInputError, match=r"another run\.name, or end that job first"):
            choose_start(config, resume, Holds(seconds_to_wait=0.3))
        assert "waiting up to 0 s for its end" in capsys.readouterr().err
    holds = Holds(seconds_to_wait=0)
    start = choose_start(config, resume, holds)
    assert (start.checkpoint, start.newest) == (directory.path(30), 30)
    with pytest.raises(BadInputError), locked_run(tmp_path / "small", seconds_to_wait=0):
        pass
    # A second look by the same process is no second job.
    assert choose_start(config, resume, holds) == start
    holds.let_go()
    with locked_run(tmp_path / "small", seconds_to_wait=0):
        pass


def test_files_that_are_damaged_are_named_where_an_older_checkpoint_is_taken(
    directory: CheckpointDirectory, tmp_path: Path
) -> None:
    (directory.path(30) / "data").write_text("cont", encoding="utf-8")
    (directory.path(20) / MANIFEST).unlink()
    start = choose_start(make_config(tmp_path), "auto")
    assert start.checkpoint == directory.path(10)
    (note,) = start.notes
    assert "using iteration 10" in note
    assert f"{directory.path(30) / 'data'} has 4 bytes, but 7 were written" in note
    assert f"{directory.path(20) / MANIFEST} does not exist" in note
    (directory.path(10) / "data").unlink()
    with pytest.raises(ConfigError, match="every checkpoint") as refused:
        choose_start(make_config(tmp_path), "auto")
    assert str(directory.path(10) / "data") in str(refused.value)
