"""A run's length in steps, samples or epochs: one number in steps, or a mistake with its key."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_samples import SMALL, VOCAB_SIZE, load_small, write

from megatron_fp8.commands.train import Command, parse_command_line
from megatron_fp8.config.check import DataReport, check_config
from megatron_fp8.config.load import dump_config, load_config
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.resume_check import compare_with_saved
from megatron_fp8.config.run_start import Position, resolve_length

NO_ITERS = "training.train_iters=0"


def mistakes(directory: Path, *overrides: str, epoch_samples: int | None = None) -> dict[str, Problem]:
    """By key; the small config has 16 samples a step."""
    loaded, problems = resolve_length(load_small(directory, overrides), epoch_samples)
    return {problem.key: problem for problem in [*problems, *check_config(loaded, 2, VOCAB_SIZE)]}


def test_samples_and_epochs_become_steps(tmp_path: Path) -> None:
    for overrides, epoch_samples, iterations in (
        (["training.train_samples=160"], None, 10),
        (["training.train_epochs=1.5"], 100, 6),
        (["training.train_epochs=2", "optimizer.lr_warmup_iters=5"], 16 * 6, 6),
    ):
        loaded, problems = resolve_length(load_small(tmp_path, [NO_ITERS, *overrides]), epoch_samples)
        assert problems == []
        assert check_config(loaded, 2, VOCAB_SIZE) == []
        assert loaded.config.training.train_iters == iterations
        assert overrides[0] in loaded.origins["training.train_iters"]


def test_without_other_keys_nothing_changes(tmp_path: Path) -> None:
    loaded = load_small(tmp_path)
    assert resolve_length(loaded, None) == (loaded, [])


def test_a_length_is_needed(tmp_path: Path) -> None:
    problem = mistakes(tmp_path, NO_ITERS)["training.train_iters"]
    assert "training.train_samples=N" in problem.use_instead


def test_steps_are_whole(tmp_path: Path) -> None:
    problem = mistakes(tmp_path, NO_ITERS, "training.train_samples=100")["training.train_samples"]
    assert "training.global_batch_size=16" in problem.reason
    assert "training.train_samples=96 or training.train_samples=112" in problem.use_instead


def test_an_epoch_that_fills_no_step_is_a_mistake(tmp_path: Path) -> None:
    problem = mistakes(tmp_path, NO_ITERS, "training.train_epochs=1", epoch_samples=15)["training.train_epochs"]
    assert "that is 15 samples" in problem.reason


def test_two_lengths_that_differ_are_a_mistake(tmp_path: Path) -> None:
    problem = mistakes(tmp_path, "training.train_samples=160")["training.train_iters"]
    assert "training.train_iters=0, or training.train_samples=null" in problem.use_instead
    assert mistakes(tmp_path, "training.train_samples=1600") == {}
    both = mistakes(tmp_path, NO_ITERS, "training.train_samples=160", "training.train_epochs=1")
    assert set(both) == {"training.train_epochs"}


def test_the_schedule_is_checked_with_the_derived_length(tmp_path: Path) -> None:
    problem = mistakes(tmp_path, NO_ITERS, "training.train_samples=160", "optimizer.lr_warmup_iters=10")
    assert "at step 10 (training.train_iters)" in problem["optimizer.lr_warmup_iters"].reason


def command_of(path: Path, *overrides: str, epoch_samples: int) -> Command:
    """What the command line makes of a config without a start to go on from."""
    report = DataReport(VOCAB_SIZE, (), epoch_samples, ("train: 1 file",))
    return parse_command_line(
        [str(path), *overrides],
        {},
        check_data=lambda config: report,
    )


def test_everything_after_the_check_sees_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SMALL.replace("train_iters: 100", "train_epochs: 2")
    path = write(tmp_path, text)
    command = command_of(path, f"run.root={tmp_path}", epoch_samples=640)
    assert command.config.training.train_iters == 40
    # What the run leaves in its directory can be read and resumed.
    saved = write(tmp_path, dump_config(command.config), "saved.yaml")
    assert command_of(saved, epoch_samples=640).config == command.config
    assert compare_with_saved(command.config, saved.read_text()) == ([], [])
    longer = command_of(path, f"run.root={tmp_path}", "training.train_epochs=4", epoch_samples=1280)
    (problem,), notes = compare_with_saved(longer.config, saved.read_text(), position=Position(20))
    assert notes == ["training.train_iters is 80, was 40"]
    assert (problem.key, problem.value) == ("training.train_epochs", 4)
    assert problem.use_instead == "optimizer.lr_decay_iters=40, or checkpoint.override_opt_param_scheduler=true"
    with pytest.raises(SystemExit) as end:
        command_of(path, "--check", "--world-size", "2", f"run.root={tmp_path}", epoch_samples=640)
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "length     40 steps" in shown
    assert "data       train: 1 file" in shown


def test_a_files_own_paths_and_a_split_exclude_each_other(tmp_path: Path) -> None:
    problem = mistakes(tmp_path, "data.data_path=[data/all]")
    assert set(problem) == {"data.train_data_path", "data.valid_data_path"}
    assert "data.data_path" in problem["data.train_data_path"].reason
    alone = ["data.data_path=[data/all]", "data.train_data_path=[]", "data.valid_data_path=[]"]
    assert mistakes(tmp_path, *alone, "data.split=90,10") == {}
    assert load_config(write(tmp_path), alone).config.data.split is None
