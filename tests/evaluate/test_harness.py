"""Numbers of lm-eval by our adapter are those of lm-eval's own `hf` model on the exported checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.checkpoint.saved_model import InferenceSettings
from megatron_fp8.errors import BadInputError
from tests.e2e.launch import ROOT, run
from tests.evaluate.conftest import Measured
from tests.evaluate.models import FP32, evaluate_tasks, harness_results
from tests.ranks import run_on_ranks

# Of the log-probability of a whole continuation or text: both compute in FP32, with sums in other orders.
TOLERANCE = 1e-4
SCORED = ["tiny_choice", "tiny_text"]
TASKS = [*SCORED, "tiny_writing"]


@pytest.fixture(scope="module")
def theirs(measured_model: Measured) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(measured_model.exported), dtype="float32", device="cpu", batch_size=2)
    return evaluate_tasks(model, measured_model.tasks, TASKS)


def assert_same(found: dict[str, Any], expected: dict[str, Any], tasks: list[str]) -> None:
    for task in tasks:
        for name, value in expected["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][name] == pytest.approx(value, rel=TOLERANCE), (task, name)
    for ours, wanted in zip(found["answers"]["tiny_choice"], expected["answers"]["tiny_choice"], strict=True):
        assert [bool(greedy) for _, greedy in ours] == [bool(greedy) for _, greedy in wanted]
        assert [total for total, _ in ours] == pytest.approx([total for total, _ in wanted], abs=TOLERANCE)
    for ours, wanted in zip(found["answers"]["tiny_text"], expected["answers"]["tiny_text"], strict=True):
        assert ours == pytest.approx(wanted, abs=TOLERANCE)


def test_numbers_are_those_of_transformers_model(measured_model: Measured, theirs: dict[str, Any]) -> None:
    (found,) = run_on_ranks(1, harness_results, measured_model.run, measured_model.tasks, TASKS, FP32)
    assert_same(found, theirs, TASKS)
    assert found["answers"]["tiny_writing"] == theirs["answers"]["tiny_writing"]
    # The reference can tell answers apart: choices differ, some text was written.
    assert len({total for answer in theirs["answers"]["tiny_choice"] for total, _ in answer}) > 10
    assert any(text for (text,) in theirs["answers"]["tiny_writing"])


@pytest.mark.parametrize(
    ("settings", "tasks"),
    [
        (InferenceSettings(mode="fp32", tensor_model_parallel_size=2), TASKS),
        (InferenceSettings(mode="fp32"), TASKS),
        pytest.param(
            InferenceSettings(mode="fp32", pipeline_model_parallel_size=2, num_microbatches=4),
            SCORED,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tp2", "dp2", "pp2"],
)
def test_every_layout_has_the_same_numbers(
    measured_model: Measured, theirs: dict[str, Any], settings: InferenceSettings, tasks: list[str]
) -> None:
    found, nothing = run_on_ranks(2, harness_results, measured_model.run, measured_model.tasks, tasks, settings)
    assert nothing is None
    assert_same(found, theirs, SCORED)
    if "tiny_writing" in tasks:
        assert found["answers"]["tiny_writing"] == theirs["answers"]["tiny_writing"]


def test_fp8_fills_samples_up_and_is_near(measured_model: Measured, theirs: dict[str, Any]) -> None:
    """One row a pass: most lengths are none that an FP8 GEMM takes."""
    settings = InferenceSettings(mode="fp8", fp8_recipe="mxfp8", micro_batch_size=1)
    (found,) = run_on_ranks(1, harness_results, measured_model.run, measured_model.tasks, SCORED, settings)
    perplexity = found["results"]["tiny_text"]["bits_per_byte,none"]
    assert perplexity == pytest.approx(theirs["results"]["tiny_text"]["bits_per_byte,none"], rel=0.01)
    assert perplexity != theirs["results"]["tiny_text"]["bits_per_byte,none"]


def test_settings_that_are_not_known_are_named() -> None:
    from megatron_fp8.evaluate.harness import sampling_of

    assert sampling_of({"do_sample": False, "temperature": 0.0}).greedy
    drawn = sampling_of({"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": None})
    assert (drawn.greedy, drawn.temperature, drawn.top_k, drawn.top_p) == (False, 0.7, 5, 1.0)
    with pytest.raises(BadInputError, match="num_beams, which is not supported"):
        sampling_of({"num_beams": 4})


@pytest.mark.slow
def test_the_program_shows_a_table_and_writes_json(measured_model: Measured, tmp_path: Path) -> None:
    options = ["--tasks", "tiny_choice", "--include-path", measured_model.tasks, "--precision", "fp32"]
    command = [sys.executable, ROOT / "tools" / "lm_eval.py", measured_model.run, *options, "--output-path", "out.json"]
    ended = run(command, tmp_path)
    assert ended.code == 0, ended.output
    results = json.loads((tmp_path / "out.json").read_text())["results"]["tiny_choice"]
    assert f"{results['acc,none']:.4f}" in ended.stdout
    assert "tiny_choice" in ended.stdout


def test_without_lm_eval_the_extra_is_named(
    measured_model: Measured, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_fp8.commands.lm_eval import main

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", [_Missing(), *sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as ended:
        main([str(measured_model.run), "--tasks", "tiny_choice"])
    assert ended.value.code == 2
    assert "pip install -e '.[eval]'" in capsys.readouterr().err


class _Missing:
    """A Python in which lm-eval is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "lm_eval":
            raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval")
