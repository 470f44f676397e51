"""A run's id at wandb stays with the run's directory, and a copy of the directory is another run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_fp8.report.wandb_sink import ID_FILE, run_id_of


def make_run(path: Path) -> tuple[Path, str]:
    path.mkdir()
    return path, run_id_of(path)


def test_a_copied_run_directory_gets_an_id_of_its_own_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original, run_id = make_run(tmp_path / "original")
    copy = Path(shutil.copytree(original, tmp_path / "copy"))
    of_copy = run_id_of(copy)
    assert of_copy != run_id
    said = capsys.readouterr().err
    assert f"{copy} is a copy of {original}, whose wandb run is {run_id}: its own is {of_copy}" in said
    assert (run_id_of(copy), run_id_of(original)) == (of_copy, run_id)
    # As the message says: who wants to continue the other one's curves can.
    (copy / ID_FILE).write_text(f"{run_id}\n", encoding="utf-8")
    assert run_id_of(copy) == run_id
    assert capsys.readouterr().err == ""


def test_a_run_directory_that_was_moved_or_restored_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, run_id = make_run(tmp_path / "original")
    moved = original.rename(tmp_path / "moved")
    assert run_id_of(moved) == run_id
    shutil.copytree(moved, tmp_path / "backup")
    shutil.rmtree(moved)
    # So that the restored directory does not get the number that has become free.
    (tmp_path / "in between").mkdir()
    shutil.copytree(tmp_path / "backup", moved)
    assert run_id_of(moved) == run_id
    monkeypatch.chdir(tmp_path)
    assert run_id_of(Path("moved")) == run_id
    assert capsys.readouterr().err == ""


def test_an_id_of_before_is_taken_for_the_directory_that_it_lies_in(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ID_FILE).write_text("abc123\n", encoding="utf-8")
    assert run_id_of(run) == "abc123"
    assert run_id_of(Path(shutil.copytree(run, tmp_path / "copy"))) != "abc123"
