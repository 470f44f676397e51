"""`tools/plot_run.py` draws what is there, and says what is wrong with what is not a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_fp8.report.record import JsonLines
from tests.e2e.launch import ROOT, Ended, run


def plot(*arguments: str, cwd: Path) -> Ended:
    return run([sys.executable, ROOT / "tools" / "plot_run.py", *arguments], cwd)


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    metrics = JsonLines(tmp_path / "metrics.jsonl")
    for iteration, loss in enumerate((4.0, float("nan"), float("inf"), 3.0), start=1):
        record = {"iteration": iteration, "lm loss": loss, "learning-rate": 1e-3, "tokens-per-second": 100.0}
        metrics.write({"event": "train", **record})
    metrics.close()
    ended = plot(".", "--output", "out.svg", cwd=tmp_path)
    assert ended.code == 0, ended.output
    assert "</svg>" in (tmp_path / "out.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, (), "metrics.jsonl does not exist; name a run directory"),
        ('{"event": "start"}\n', (), "has no training step yet"),
        ('{"event": "start"}\n{"event"\n', (), "line 2 is not JSON"),
        ('{"loss": 1}\n', (), "line 1 is not a record of a run"),
        ('{"event": "start"}\n', ("--output", "picture.gif"), "use .png or .svg"),
        ('{"event": "start"}\n', ("--output", "nowhere/picture.png"), "there is no directory nowhere"),
    ],
)
def test_what_cannot_be_drawn_is_explained(
    content: str | None, arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    if content is not None:
        (tmp_path / "run" / "metrics.jsonl").write_text(content, encoding="utf-8")
    ended = plot("run", *arguments, cwd=tmp_path)
    assert ended.code == 2, ended.output
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing was written"
