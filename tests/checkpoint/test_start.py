"""What a run starts from: the latest checkpoint, the newest whole one, or a message; damage of every kind is found."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.checkpoint.directory import TRACKER, CheckpointDirectory
from megatron_fp8.checkpoint.manifest import find_corruption, read_manifest, write_manifest
from megatron_fp8.checkpoint.resume import choose_start
from megatron_fp8.commands.train import Command, parse_command_line
from megatron_fp8.config.check import DataReport
from megatron_fp8.config.load import dump_config
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.config.run_start import Position, Start, samples_needed
from megatron_fp8.config.schema import Config
from megatron_fp8.errors import BadInputError
from tests.checkpoint.training import checkpoint_config, save_on_this_rank
from tests.ranks import run_on_ranks
from tests.small_run import VOCAB_SIZE

FILES = ("__0_0.distcp", "__0_1.distcp", ".metadata", "manifest.json")


def make_config(root: Path, **checkpoint: Any) -> Config:
    return checkpoint_config(
        run={"root": str(root)},
        model={"num_layers": 1},
        training={"eval_iters": 0},
        data={"train_data_path": ["tokens"], "tokenizer_model": "tokenizer.json"},
        checkpoint=checkpoint,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of runs; the run `small` has checkpoints of iterations 1 to 3."""
    root = tmp_path_factory.mktemp("runs")
    run_on_ranks(1, save_on_this_rank, make_config(root), root / "small" / "checkpoints", [1, 2, 3])
    return root


@pytest.fixture
def runs(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "runs"))


def checkpoints(runs: Path) -> CheckpointDirectory:
    return CheckpointDirectory(runs / "small" / "checkpoints")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def refusal(config: Config, resume: Any = None) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_start(config, resume)
    return str(caught.value)


def test_the_files_of_a_checkpoint_are_those_that_are_damaged_below(runs: Path) -> None:
    names = {path.name for path in checkpoints(runs).path(3).iterdir()}
    assert names == set(FILES)
    assert set(read_manifest(checkpoints(runs).path(3)).files) == set(FILES) - {"manifest.json"}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [truncate, Path.unlink])
def test_a_file_that_is_missing_or_short_is_named_with_what_to_use_instead(runs: Path, name: str, harm) -> None:
    path = checkpoints(runs).path(3) / name
    harm(path)
    for config, resume in ((make_config(runs), "latest"), (make_config(runs, load=str(runs / "small")), None)):
        text = refusal(config, resume)
        assert str(path) in text
        assert "checkpoint.ckpt_step=2" in text
        assert "--resume=auto" in text
    start = choose_start(make_config(runs), "auto")
    assert start.checkpoint == checkpoints(runs).path(2)
    assert any("using iteration 2" in note for note in start.notes)


def verified_starts(config: Config, starts: list[Start]) -> list[Any]:
    from megatron_fp8.checkpoint.rank_io import verified_start

    results: list[Any] = []
    for start in starts:
        try:
            results.append(verified_start(start, config))
        except BadInputError as error:
            results.append(str(error))
    return results


def test_a_flipped_bit_in_any_file_is_found_by_all_ranks_together(runs: Path, tmp_path: Path) -> None:
    """Sizes do not show it; every byte is read before anything of it is used."""
    refused, taken, paths = [], [], []
    for name in FILES:
        copy = Path(shutil.copytree(runs, tmp_path / f"flipped-{name}"))
        path = checkpoints(copy).path(3) / name
        flip_a_bit(path)
        if name == "manifest.json":
            assert str(path) in refusal(make_config(copy), "latest")
            assert choose_start(make_config(copy), "auto").checkpoint == checkpoints(copy).path(2)
            continue
        paths.append(path)
        refused.append(choose_start(make_config(copy), "latest"))
        taken.append(choose_start(make_config(copy), "auto"))
    # A checkpoint under a name of somebody's own has no older ones beside it.
    other = tmp_path / "a copy of my own"
    shutil.copytree(paths[0].parent, other)
    refused.append(choose_start(make_config(tmp_path, load=str(other)), None))
    paths.append(other / paths[0].name)
    for results in run_on_ranks(2, verified_starts, make_config(runs), refused + taken):
        for path, text in zip(paths, results[: len(refused)], strict=True):
            assert f"{path} is corrupt: its SHA-256 differs" in text
        assert all("checkpoint.ckpt_step=2, or --resume=auto" in text for text in results[: len(refused) - 1])
        for path, (start, notes) in zip(paths, results[len(refused) :], strict=False):
            assert start.checkpoint == path.parent.parent / "iter_0000002"
            assert len(notes) == 1
            assert f"{path} is corrupt: its SHA-256 differs" in notes[0]
            assert "using iteration 2 instead" in notes[0]


def test_every_bit_of_a_manifest_counts(runs: Path) -> None:
    """Numbers in it decide where training goes on; a digit that changed would not be noticed."""
    path = checkpoints(runs).path(3) / "manifest.json"
    text = path.read_text(encoding="utf-8")
    assert '"consumed_samples": 24' in text
    path.write_text(text.replace('"consumed_samples": 24', '"consumed_samples": 25'), encoding="utf-8")
    (problem,) = find_corruption(path.parent)
    assert "SHA-256" in problem


def test_a_manifest_of_a_newer_format_is_refused_by_that_name(runs: Path) -> None:
    path = checkpoints(runs).path(3)
    write_manifest(path, replace(read_manifest(path), format_version=99))
    assert "format 99 is newer" in refusal(make_config(runs), "latest")


@pytest.mark.parametrize("text", ["", "three", "-3", "33", "2\n3"])
def test_a_tracker_that_is_wrong_is_refused_and_auto_does_without(runs: Path, text: str) -> None:
    (checkpoints(runs).root / TRACKER).write_text(text, encoding="utf-8")
    message = refusal(make_config(runs), "latest")
    assert "checkpoint.ckpt_step=3" in message
    start = choose_start(make_config(runs), "auto")
    assert start.checkpoint == checkpoints(runs).path(3)
    assert any("using iteration 3" in note for note in start.notes)


def test_a_missing_tracker_is_refused_and_auto_does_without(runs: Path) -> None:
    (checkpoints(runs).root / TRACKER).unlink()
    assert f"{TRACKER} is missing" in refusal(make_config(runs), "latest")
    assert choose_start(make_config(runs), "auto").checkpoint == checkpoints(runs).path(3)


def test_the_step_that_is_asked_for_is_taken(runs: Path) -> None:
    for resume, load in (("latest", {}), (None, {"load": str(runs / "small")})):
        assert choose_start(make_config(runs, ckpt_step=2, **load), resume).checkpoint == checkpoints(runs).path(2)
        text = refusal(make_config(runs, ckpt_step=7, **load), resume)
        assert "no checkpoint of iteration 7" in text
        assert "[1, 2, 3]" in text


@pytest.mark.parametrize("inside", ["small", "small/checkpoints", "small/checkpoints/iter_0000003"])
def test_a_checkpoint_is_loaded_from_any_path_that_means_it(runs: Path, inside: str) -> None:
    start = choose_start(make_config(runs, load=str(runs / inside)), None)
    saved = read_manifest(checkpoints(runs).path(3)).config
    assert start == Start(
        checkpoint=checkpoints(runs).path(3), saved_config=saved, saved_world_size=1, position=Position(3, 24)
    )
    weights = choose_start(make_config(runs, load=str(runs / inside), load_weights_only=True), None)
    assert weights == replace(start, weights_only=True, position=Position())


@pytest.mark.parametrize("inside", ["nowhere", ".", "small/checkpoints/iter_0000007", "small/metrics.jsonl"])
def test_a_path_without_a_checkpoint_is_never_a_fresh_start(runs: Path, inside: str) -> None:
    text = refusal(make_config(runs, load=str(runs / inside)))
    assert "checkpoint.load" in text
    assert "start from scratch" in text


def test_resuming_without_a_checkpoint_is_refused_unless_it_is_auto(tmp_path: Path) -> None:
    assert "never starts from initial weights" in refusal(make_config(tmp_path), "latest")
    start = choose_start(make_config(tmp_path), "auto")
    assert (start.checkpoint, start.run_directory) == (None, None)
    assert "starting from initial weights" in start.notes[0]


def test_resuming_goes_on_in_the_runs_own_directory(runs: Path) -> None:
    start = choose_start(make_config(runs), "latest")
    assert start.run_directory == runs / "small"
    assert (start.checkpoint, start.may_fall_back, start.notes) == (checkpoints(runs).path(3), False, ())


def test_mistakes_that_name_no_checkpoint_are_refused(runs: Path) -> None:
    assert "one of the two" in refusal(make_config(runs, load=str(runs / "small")), "latest")
    assert "so nothing is loaded" in refusal(make_config(runs, ckpt_step=2))
    for iteration in (1, 2, 3):
        (checkpoints(runs).path(iteration) / ".metadata").unlink()
    assert "every checkpoint" in refusal(make_config(runs), "auto")


def command(config: Config, runs: Path, *arguments: str) -> Command:
    path = runs / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    return parse_command_line(
        [str(path), *arguments],
        {},
        check_data=lambda config: DataReport(vocab_size=VOCAB_SIZE, problems=()),
    )


@pytest.mark.parametrize("arguments", [("optimizer.lr=0.5",), ("optimizer.weight_decay=0.5", "optimizer.min_lr=1e-5")])
def test_the_schedule_is_replaced_only_when_the_config_says_so(
    runs: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(make_config(runs), runs, "--resume", *arguments)
    assert ended.value.code == 2
    text = capsys.readouterr().err
    for argument in arguments:
        assert argument.split("=")[0] in text
    assert "checkpoint.override_opt_param_scheduler=true" in text
    started = command(make_config(runs), runs, "--resume", "checkpoint.override_opt_param_scheduler=true", *arguments)
    assert started.start.checkpoint == checkpoints(runs).path(3)
    assert all(any(argument.split("=")[0] in note for note in started.start.notes) for argument in arguments)


@pytest.mark.parametrize(
    ("argument", "before"),
    [("model.num_layers=2", "1"), ("training.seed=7", "1234"), ("model.rotary_base=500", "10000")],
)
def test_another_model_or_order_of_samples_is_refused_with_the_value_that_fits(
    runs: Path, argument: str, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(make_config(runs), runs, "--resume", argument)
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert f"use: {argument.split('=')[0]}={before}" in text


def test_what_may_change_is_mentioned(runs: Path) -> None:
    arguments = ("training.global_batch_size=8", "precision.mode=bf16", "model.hidden_dropout=0.2")
    notes = command(make_config(runs), runs, "--resume", *arguments).start.notes
    assert len(notes) == len(arguments)
    for argument in arguments:
        assert any(note.startswith(argument.split("=")[0]) for note in notes)


LENGTHS = (
    (("training.train_iters=9",), "training.train_iters = 9", 9),
    (
        ("training.train_iters=0", "training.train_samples=56", "training.global_batch_size=8"),
        "training.train_samples = 56",
        7,
    ),
    (("optimizer.lr_decay_iters=5",), "optimizer.lr_decay_iters = 5", 5),
)


@pytest.mark.parametrize(("arguments", "blamed", "end"), LENGTHS)
def test_the_decay_ends_where_it_was_to_end(
    runs: Path, arguments: tuple[str, ...], blamed: str, end: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it follows from; else the learning rate would jump."""
    with pytest.raises(SystemExit) as ended:
        command(make_config(runs), runs, "--resume", "optimizer.lr_warmup_iters=4", *arguments)
    assert ended.value.code == 2
    text = " ".join(capsys.readouterr().err.split())
    assert blamed in text
    assert f"would end at step {end}, but at step 6 in the checkpoint's schedule" in text
    assert "optimizer.lr_decay_iters=6, or checkpoint.override_opt_param_scheduler=true" in text
    if "lr_decay_iters" not in blamed:
        kept = command(make_config(runs), runs, "--resume", *arguments, "optimizer.lr_decay_iters=6")
        assert not any("decay" in note for note in kept.start.notes)
    meant = command(make_config(runs), runs, "--resume", *arguments, "checkpoint.override_opt_param_scheduler=true")
    assert f"the learning-rate decay ends at step {end}, was 6" in meant.start.notes


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_a_run_whose_length_is_in_samples_goes_on_with_another_batch(runs: Path, batch: int) -> None:
    """The checkpoint is of three steps of 8 samples."""
    length = ("training.train_iters=0", "training.train_samples=160", "optimizer.lr_decay_iters=6")
    chosen = command(make_config(runs), runs, "--resume", f"training.global_batch_size={batch}", *length)
    assert chosen.start.position == Position(3, 24)
    assert chosen.config.training.train_iters == 3 + (160 - 24) // batch
    assert samples_needed(chosen.config.training, chosen.start.position) == 160


def test_what_is_left_of_the_samples_is_in_whole_steps(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    length = ("training.train_iters=0", "training.train_samples=160", "training.global_batch_size=12")
    with pytest.raises(SystemExit) as ended:
        command(make_config(runs), runs, "--resume", *length)
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert "the 136 samples after the 24 consumed are not divisible by training.global_batch_size=12" in text
    assert "use: training.train_samples=156 or training.train_samples=168" in text


def test_a_length_in_steps_takes_the_samples_that_are_left_to_it(runs: Path) -> None:
    config = make_config(runs)
    chosen = command(config, runs, "--resume", "training.global_batch_size=2")
    steps_left = config.training.train_iters - 3
    assert samples_needed(chosen.config.training, chosen.start.position) == 24 + 2 * steps_left


def test_a_wrong_path_ends_with_the_exit_code_of_a_mistake(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(make_config(runs), runs, f"checkpoint.load={runs}/typo", "run.name=other")
    assert ended.value.code == 2
    assert "there is no such directory" in capsys.readouterr().err


def test_the_manifest_says_what_made_the_checkpoint(runs: Path) -> None:
    values = json.loads((checkpoints(runs).path(3) / "manifest.json").read_text(encoding="utf-8"))
    assert values["iteration"] == 3
    assert values["counters"]["consumed_samples"] == 24
    assert values["layout"]["world_size"] == 1
    assert {"torch", "megatron-core", "transformer-engine", "megatron-fp8"} <= values["versions"].keys()
    assert "num_layers: 1" in values["config"]


@pytest.mark.parametrize("text", ["model: !!python/object/apply:os.getcwd []", "[1, 2]", "model: 3", "model: {"])
def test_a_config_that_is_none_makes_a_checkpoint_damaged(runs: Path, text: str) -> None:
    path = checkpoints(runs).path(3)
    write_manifest(path, replace(read_manifest(path), config=text))
    assert "the checkpoint is corrupt" in refusal(make_config(runs), "latest")
    assert choose_start(make_config(runs), "auto").checkpoint == checkpoints(runs).path(2)


@pytest.mark.parametrize(
    ("arguments", "world_size", "warned"),
    [
        (("--resume",), "1", False),
        (("--resume=auto",), "1", False),
        (("--resume",), "2", True),
        (("--resume", "data.num_workers=2"), "1", True),
        (("--resume", "--check"), "1", True),
        (("run.name=other",), "1", True),
        (("run.name=other", "checkpoint.load={runs}/small"), "1", True),
    ],
)
def test_warnings_of_a_config_are_not_repeated_when_it_is_resumed(
    tmp_path: Path, arguments: tuple[str, ...], world_size: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    # WSD's keys have no effect here.
    config = make_config(tmp_path)
    optimizer = config.optimizer.model_copy(update={"lr_wsd_decay_iters": 2})
    config = config.model_copy(update={"optimizer": optimizer})
    run_on_ranks(1, save_on_this_rank, config, tmp_path / "small" / "checkpoints", [1])
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    argv = [str(tmp_path / "config.yaml"), *(argument.format(runs=tmp_path) for argument in arguments)]
    report = DataReport(vocab_size=VOCAB_SIZE, problems=())
    with pytest.raises(SystemExit, match="0") if "--check" in arguments else nullcontext():
        parse_command_line(argv, {"RANK": "0", "WORLD_SIZE": world_size}, check_data=lambda _: report)
    assert ("no effect: optimizer.lr_decay_style" in capsys.readouterr().err) is warned


def test_variables_that_the_job_overrides_are_named_at_every_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are the machine's, which the saved config does not know."""
    config = make_config(tmp_path)
    parallel = config.parallel.model_copy(update={"environment": ["NCCL_DEBUG=WARN"]})
    config = config.model_copy(update={"parallel": parallel})
    run_on_ranks(1, save_on_this_rank, config, tmp_path / "small" / "checkpoints", [1])
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    environ = {"RANK": "0", "WORLD_SIZE": "1", "NCCL_DEBUG": "INFO"}
    report = DataReport(vocab_size=VOCAB_SIZE, problems=())
    parse_command_line([str(tmp_path / "config.yaml"), "--resume"], environ, check_data=lambda _: report)
    assert "NCCL_DEBUG=INFO, which takes precedence" in capsys.readouterr().err
