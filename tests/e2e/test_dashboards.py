"""Whole runs as people see them: one curve in every view of a run that was stopped and continued, and a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .conftest import TRAIN_ITERS, Tiny
from .launch import PRETRAIN, ROOT, clean_environment, pretrain, run

sys.path.insert(0, str(ROOT / "tests" / "report"))
from sink_files import only_wandb_file, tensorboard_scalars, wandb_history, wandb_messages
from terminal import run_on_terminal

VIEWS = ("logging.tensorboard_dir=tensorboard", "logging.wandb_project=tests", "logging.wandb_mode=offline")


@pytest.mark.slow
def test_a_run_and_its_resume_are_one_curve_in_every_view(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write_config(tmp_path)
    environment = {name: str(tmp_path / "client") for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")}
    command = [sys.executable, PRETRAIN, "tiny.yaml", *VIEWS]
    stopped = run([*command, "checkpoint.exit_interval=3"], tmp_path, environment)
    assert stopped.code == 75, stopped.output
    resumed = run([*command, "--resume"], tmp_path, environment)
    assert resumed.code == 0, resumed.output

    directory = tmp_path / "runs" / "tiny"
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = [line["lm loss"] for line in lines if line["event"] == "train"]
    path = only_wandb_file(directory)
    history = wandb_history(path)
    assert [row["_step"] for row in history] == list(range(TRAIN_ITERS + 1))
    assert [row["lm loss"] for row in history[1:]] == losses
    assert [row["_step"] for row in history if "lm loss validation" in row] == [0, 3, TRAIN_ITERS]
    assert sum(message.WhichOneof("record_type") == "artifact" for message in wandb_messages(path)) == 2
    scalars = tensorboard_scalars(directory / "tensorboard")
    assert [step for step, _, _ in scalars["lm loss"]] == list(range(1, TRAIN_ITERS + 1))
    assert [value for _, _, value in scalars["lm loss"]] == pytest.approx(losses)
    # What one CPU says of itself: no share of a peak.
    train = next(line for line in lines if line["event"] == "train")
    assert (train["mfu"], train["batch-size"], train["pipeline-bubble"], train["slowest-rank"]) == (None, 4, 0, 0)
    assert train["throughput"] > 0
    assert "withheld" in lines[0]["mfu"]

    replayed = run(
        [sys.executable, ROOT / "tools" / "replay.py", directory, "--tensorboard", "--wandb"], tmp_path, environment
    )
    assert replayed.code == 0, replayed.output
    assert wandb_history(only_wandb_file(directory)) == history
    assert tensorboard_scalars(directory / "tensorboard") == scalars


@pytest.mark.slow
def test_ranks_on_a_terminal_have_one_live_line(tiny: Tiny, tmp_path: Path) -> None:
    """torchrun hands its terminal on to all ranks; rank 0 alone draws."""
    tiny.write_config(tmp_path, tp=2)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, PRETRAIN, "tiny.yaml", "precision.fp8_health_interval=2"]
    code, screen = run_on_terminal(command, tmp_path, 150, clean_environment())
    text = "\n".join(screen.lines)
    assert code == 0, text
    drawn = [line for line in screen.last_lines if f"/{TRAIN_ITERS}  " in line]
    for iteration in range(1, TRAIN_ITERS + 1):
        assert any(f" {iteration}/{TRAIN_ITERS}  loss " in line for line in drawn), drawn
    assert any(" fp8 clip " in line for line in drawn)
    assert screen.cursor_visible
    # What stays: evaluations and the rest, and no line that was drawn.
    assert text.count("lm loss validation") == 4
    assert f"finished {TRAIN_ITERS} iterations" in text
    assert f"/{TRAIN_ITERS}  loss" not in text
    log = (tmp_path / "runs" / "tiny" / "console.log").read_text()
    assert log.count("\niteration ") == TRAIN_ITERS + 3
    assert "\x1b" not in log


@pytest.mark.slow
def test_a_quiet_run_says_nothing_and_logs_everything(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write_config(tmp_path, mode="bf16")
    ended = pretrain("tiny.yaml", "--quiet", cwd=tmp_path)
    assert (ended.code, ended.stdout) == (0, ""), ended.output
    assert "finished" in (tmp_path / "runs" / "tiny" / "console.log").read_text()
