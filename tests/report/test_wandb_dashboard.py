"""The dashboard as code: what it prints, and that its panels show series that a run has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_fp8.commands import dashboard
from megatron_fp8.report.record import METRICS, JsonLines
from megatron_fp8.report.series import Section
from tools import dashboard_picture


def test_the_view_can_be_reviewed(capsys: pytest.CaptureFixture[str]) -> None:
    dashboard.main(["--json", "--entity", "team", "--project", "gpt"])
    printed = capsys.readouterr().out
    view = json.loads(printed)
    assert (view["entity"], view["project"]) == ("team", "gpt")
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == ["Training", "Throughput", "Norms", "FP8 health"]
    # What is printed is what the library's own schema accepts.
    assert type(dashboard.workspace("team", "gpt")._to_model()).model_validate(view) is not None
    shown = [metric for section in sections for panel in section["panels"] for metric in panel["config"]["metrics"]]
    assert len(shown) == len(set(shown))
    assert {"lm loss", "mfu", "fp8 map/layernorm_mlp.fc1/input/amax"} <= set(shown)
    # The same in another process, with nothing random in it.
    dashboard.main(["--json", "--entity", "team", "--project", "gpt"])
    assert capsys.readouterr().out == printed


def test_saving_needs_a_project(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        dashboard.main([])
    assert ended.value.code == 2
    assert "--entity and --project" in capsys.readouterr().err


def test_the_picture_has_the_panels_of_which_a_run_has_something(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record = JsonLines(tmp_path / METRICS)
    for iteration in (1, 2):
        record.write({"event": "train", "iteration": iteration, "lm loss": 2.0, "grad-norm": float("nan"), "mfu": 0.4})
    record.close()
    points = dashboard_picture.points_of(tmp_path / METRICS)
    assert points == {"lm loss": [(1, 2.0), (2, 2.0)], "mfu": [(1, 0.4), (2, 0.4)]}
    assert list(dashboard_picture.drawn_panels(Section.TRAINING, points).values()) == [["lm loss"]]
    dashboard_picture.main([str(tmp_path), str(tmp_path / "picture.png")])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
