"""The dashboard as code: what it prints, and that its panels show series that a run has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools import wandb_dashboard

ROOT = Path(__file__).resolve().parents[2]


def test_the_view_can_be_reviewed(capsys: pytest.CaptureFixture[str]) -> None:
    assert wandb_dashboard.main(["--json", "--entity", "team", "--project", "gpt"]) == 0
    printed = capsys.readouterr().out
    view = json.loads(printed)
    assert (view["entity"], view["project"]) == ("team", "gpt")
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == ["Training", "Throughput", "Norms", "FP8 health"]
    shown = [metric for section in sections for panel in section["panels"] for metric in panel["config"]["metrics"]]
    assert len(shown) == len(set(shown))
    assert {"lm loss", "mfu", "fp8 map/layernorm_mlp.fc1/input/amax"} <= set(shown)
    # The same in another process, with nothing random in it.
    wandb_dashboard.main(["--json", "--entity", "team", "--project", "gpt"])
    assert capsys.readouterr().out == printed


def test_saving_needs_a_project(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        wandb_dashboard.main([])
    assert ended.value.code == 2
    assert "--entity and --project" in capsys.readouterr().err


def test_panels_name_what_the_code_records() -> None:
    files = ("interval_record", "throughput", "time_split", "norms", "evaluate", "checkpointing")
    code = "".join((ROOT / "megatron_fp8" / "train" / f"{name}.py").read_text() for name in files)
    recorded = set(re.findall(r'"([a-z][a-z0-9 /-]+)"', code)) | {"lm loss validation", "lm loss validation ppl"}
    for _, names in [*wandb_dashboard.TRAINING, *wandb_dashboard.THROUGHPUT]:
        assert {name.removeprefix("checkpoint/") for name in names} <= recorded
    for _, names in wandb_dashboard.norm_panels():
        assert {part for name in names for part in name.removeprefix("norm map/").split("/")} <= recorded
