"""The command line: what it answers, on which stream, with which exit code, and who speaks for a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from config_samples import SMALL, VOCAB_SIZE, write

from megatron_fp8.commands.train import Command, parse_command_line
from megatron_fp8.config.check import DataReport
from megatron_fp8.config.fields import config_fields
from megatron_fp8.config.load import LoadedConfig, load_config
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.plan_report import describe_plan


def good_data(_: Config) -> DataReport:
    """As if all files were there."""
    return DataReport(VOCAB_SIZE, ())


def bad_data(config: Config) -> DataReport:
    """As if the training text were missing."""
    return DataReport(
        VOCAB_SIZE, (Problem("data.train_data_path", config.data.train_data_path, "no such file", "a file"),)
    )


def plan(loaded: LoadedConfig, world_size: int | None) -> tuple[str, list[Problem]]:
    """The config's real plan, of the vocabulary above, and its warnings."""
    return describe_plan(loaded, world_size, good_data)


def parse(*arguments: object, environ: Mapping[str, str] | None = None) -> Command:
    """The command of a correct line."""
    return parse_command_line([str(argument) for argument in arguments], environ or {}, check_data=good_data)


def exit_code(*arguments: object, environ: Mapping[str, str] | None = None) -> int | str | None:
    """The code that a line ends the process with."""
    with pytest.raises(SystemExit) as caught:
        parse(*arguments, environ=environ)
    return caught.value.code


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A valid config in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return write(tmp_path)


def test_a_correct_line_gives_config_origins_and_vocabulary(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = parse(path, "training.seed=7", environ={"WORLD_SIZE": "8", "RANK": "0"})
    assert command.config.training.seed == 7
    assert command.origins["training.seed"] == "command line"
    assert command.vocab_size == VOCAB_SIZE
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ([], {}, "CONFIG is missing"),
        (["nowhere.yaml"], {}, "no such file"),
        (["training.seed=7"], {}, "CONFIG must come first"),
        (["CONFIG", "training.seed=x"], {}, "not an integer"),
        (["CONFIG", "--model.num_layers=4"], {}, "use model.num_layers=4 without dashes"),
        (["CONFIG", "--num-layers", "4"], {}, "use model.num_layers=VALUE without dashes"),
        (["CONFIG", "--frobnicate"], {}, "unknown option --frobnicate"),
        (["CONFIG", "--chec"], {}, "unknown option --chec"),
        (["CONFIG", "--world-size", "4"], {}, "requires --check or --plan"),
        (["CONFIG", "--check", "--plan"], {}, "exclude each other"),
        (["CONFIG", "--check", "--world-size", "0"], {}, "not a number of ranks"),
        (["CONFIG", "--check", "--world-size", "four"], {}, "invalid int value"),
        (["CONFIG"], {"WORLD_SIZE": "many"}, "WORLD_SIZE"),
        (["CONFIG"], {"WORLD_SIZE": "3"}, "size 3"),
        (["CONFIG", "model.num_layers=3", "parallel.pipeline_model_parallel_size=2"], {}, "model.num_layers = 3"),
    ],
)
def test_a_mistake_ends_with_code_2_and_a_message_on_standard_error(
    path: Path,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    environ: dict[str, str],
    message: str,
) -> None:
    arguments = [str(path) if argument == "CONFIG" else argument for argument in arguments]
    assert exit_code(*arguments, environ=environ) == 2
    output = capfd.readouterr()
    assert message in output.err
    assert output.out == ""


def test_data_config_and_run_directory_are_reported_together(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (path.parent / "runs" / "small").mkdir(parents=True)
    with pytest.raises(SystemExit):
        parse_command_line([str(path), "optimizer.min_lr=1"], {}, check_data=bad_data)
    error = capfd.readouterr().err
    assert "3 mistakes" in error
    assert f"data.train_data_path = [data/train]  ({path}:17)" in error
    assert "optimizer.min_lr = 1.0  (command line)" in error
    assert f"run.name = small  ({path}:2)" in error


def test_plan_warns_as_the_check_does(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = (path, "--world-size", "4", "precision.mode=fp32", "model.seq_length=4096", "optimizer.lr_warmup_init=1e-4")
    told = {}
    for option in ("--check", "--plan"):
        assert exit_code(*line, option) == 0
        told[option] = capfd.readouterr().err
    assert told["--plan"] == told["--check"]
    for words in ("lr_warmup_init", "FP32 attention is not fused"):
        assert words in told["--plan"]


def test_plan_says_what_the_run_takes_without_its_files(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code(path, "--plan", "--world-size", "4", "parallel.tensor_model_parallel_size=2") == 0
    output = capfd.readouterr()
    assert "TP 2 x PP 1 x DP 2" in output.out
    for word in ("whole model", "gradients", "MiB", "MFLOP", "GPU-hours", "DP reduce-scatter"):
        assert word in output.out
    assert output.err == ""
    assert not (path.parent / "runs").exists()
    assert exit_code(path, "--plan", "--world-size", "7", "model.ffn_hidden_size=1001") == 2
    assert "training.global_batch_size" in capfd.readouterr().err


def test_an_existing_run_is_accepted_under_a_new_name(path: Path) -> None:
    (path.parent / "runs" / "small").mkdir(parents=True)
    assert exit_code(path) == 2
    assert parse(path, "run.new_name_if_exists=true").config.run.name == "small"


def test_check_says_what_would_run(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code(path, "--check", "--world-size", "4", "parallel.tensor_model_parallel_size=2") == 0
    output = capfd.readouterr()
    assert "TP 2 x PP 1 x DP 2" in output.out
    assert "16 samples = 2 x DP 2 x 4 micro-batches" in output.out
    assert "vocabulary 1,000 padded to 1,024" in output.out
    assert output.err == ""
    assert not (path.parent / "runs").exists()


def test_check_takes_the_world_size_of_the_job_or_says_which_fit(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code(path, "--check", environ={"WORLD_SIZE": "2"}) == 0
    assert "can run on 2 ranks" in capfd.readouterr().out
    assert exit_code(path, "--check") == 0
    assert "can run on 1, 2, 4, 8 ranks" in capfd.readouterr().out


def test_warnings_do_not_stop_a_run(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parse(path, "precision.fp8_margin=1")
    assert "warning: precision.fp8_margin = 1  (command line)" in capfd.readouterr().err


def test_print_config_writes_a_config_that_reads_back_equal(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code(path, "optimizer.lr=1e-5", "--print-config") == 0
    printed = capfd.readouterr().out
    assert (
        load_config(write(path.parent, printed, "printed.yaml")).config
        == load_config(path, ["optimizer.lr=1e-5"]).config
    )
    assert "lr: 1.0e-05  # command line" in printed
    assert yaml.safe_load(printed)["training"]["seed"] == 1234


def test_help_lists_every_key_with_its_default(capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    text = " ".join(capfd.readouterr().out.split())
    for key, spec in config_fields().items():
        assert f"{key} {spec.description}" in text
        assert spec.doc in text
    assert "training.seed an integer, at least 0 and at most 4,294,967,295 [1234]" in text


def test_one_rank_speaks_and_all_end(
    path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    error_file = tmp_path / "error.json"
    torchrun = {"WORLD_SIZE": "3", "TORCHELASTIC_ERROR_FILE": str(error_file)}
    for rank, local_rank, speaks in ((0, 0, True), (1, 1, False), (2, 0, False)):
        environ = {**torchrun, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        assert exit_code(path, environ=environ) == 2
        assert bool(capfd.readouterr().err) == speaks
        # The first rank of another machine leaves the message to that machine's torchrun.
        assert error_file.exists() == (rank == 2)
        # A silent rank that ended first would have the launcher end the speaking one.
        assert len(waits) == (rank >= 1)
    assert "training.global_batch_size" in json.loads(error_file.read_text())["message"]["message"]


PROGRAM = """
import sys, time
from megatron_fp8.commands.train import parse_command_line
from megatron_fp8.config.load import process_environment
from megatron_fp8.config.check import DataReport
if "real" in sys.argv[1]:
    from megatron_fp8.data.check_data import check_data
else:
    check_data = lambda config: DataReport(1000, ())
try:
    parse_command_line(sys.argv[2:], process_environment(), check_data=check_data)
finally:
    heavy = {"torch", "transformer_engine", "megatron", "transformer_engine_torch"} & set(sys.modules)
    print("HEAVY", sorted(heavy), "SECONDS", time.process_time())
"""


def run_program(directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["CONFIG", "--check"], ["CONFIG", "--plan"], ["CONFIG", "--print-config"], ["CONFIG"]],
)
@pytest.mark.parametrize("data", ["stub", "real"])
def test_nothing_heavy_is_imported(path: Path, data: str, arguments: list[str]) -> None:
    arguments = [str(path) if argument == "CONFIG" else argument for argument in arguments]
    result = run_program(path.parent, data, *arguments)
    assert "HEAVY [] SECONDS" in result.stdout, result.stderr
    # Without its files the config is refused when they are looked for.
    refused = data == "real" and "--help" not in arguments and "--print-config" not in arguments
    assert result.returncode == (2 if refused else 0), result.stderr


def test_check_answers_in_a_second(path: Path) -> None:
    result = run_program(path.parent, "real", path, "--check", "--world-size", "7", "model.ffn_hidden_size=1001")
    assert result.returncode == 2
    # The process's own time, its start included: other work on the machine does not count.
    assert float(result.stdout.split()[-1]) < 1.0


def test_torchrun_shows_the_message_once(path: Path, tmp_path: Path) -> None:
    write(tmp_path, PROGRAM, "program.py")
    write(tmp_path, SMALL.replace("16", "5"), "wrong.yaml")
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, "program.py", "stub", "wrong.yaml"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert (result.stdout + result.stderr).count("not divisible by") == 1
    assert "exitcode  : 2" in result.stderr
