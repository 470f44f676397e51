"""The dashboard as code: what it prints, and that its panels show series that a run has."""

from __future__ import annotations

import json

import pytest

from megatron_fp8.commands import dashboard


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
