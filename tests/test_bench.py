"""The benchmark measures what it says: the same model and work on both sides, times and ratios taken from clocks."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.speed.measurement import Comparison, Sample, Subject, SubjectResult, ceiling, make_plan, ratio

from megatron_fp8.config.load import load_config
from megatron_fp8.config.schema import Config
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.ffn_hidden_size=96",
    "model.seq_length=32",
    "model.vocab_size=256",
    "training.micro_batch_size=2",
    "training.global_batch_size=4",
]


def tiny_config(mode: str = "fp32") -> Config:
    return load_config(ROOT / "configs" / "r1.yaml", [*TINY, f"precision.mode={mode}"]).config


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), "--threads", "1", *arguments]
    return run(command)


def losses_of_both(mode: str, num_steps: int) -> dict[str, list[float]]:
    """Both runs of the benchmark in one process: from the same seed, on the same tokens."""
    from benchmarks.plain_run import plain_run
    from benchmarks.runs import OurRun, repeated_batch

    config = tiny_config(mode)
    ours, plain = OurRun(config, repeated_batch(config)), plain_run(config, repeated_batch(config), mode)
    stage = ours.parts.chunks[0].module
    return {
        "ours": [ours.step().loss for _ in range(num_steps)],
        "plain": [plain.step().loss for _ in range(num_steps)],
        "parameters": [ours.num_parameters, plain.num_parameters, sum(p.numel() for p in stage.parameters())],
        "norm": [float(p.float().norm()) for p in (stage.output_layer.weight, plain.model.head.weight)],
    }


@pytest.mark.parametrize(("mode", "tolerance"), [("fp32", 1e-5), ("bf16", 5e-3)])
def test_plain_and_our_model_are_the_same(mode: str, tolerance: float) -> None:
    (both,) = run_on_ranks(1, losses_of_both, mode, 5)
    assert len(set(both["parameters"])) == 1
    assert both["ours"][0] == pytest.approx(5.545, abs=0.1), "ln(256) at the start"
    assert both["ours"][-1] < both["ours"][0] - 1e-2, "it learns, so the optimizer's share is compared too"
    assert both["plain"] == pytest.approx(both["ours"], rel=tolerance)
    assert both["norm"][1] == pytest.approx(both["norm"][0], rel=tolerance)


def test_numbers_are_measured(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    started = time.perf_counter()
    finished = bench(*TINY, "--modes", "fp32", "--rounds", "3", "--profile", "--json", str(output))
    wall_seconds = time.perf_counter() - started
    assert finished.returncode == 0, finished.stderr
    found = json.loads(output.read_text())
    subjects = {entry["subject"]["name"]: entry for entry in found["subjects"]}
    assert set(subjects) == {"ours fp32", "plain fp32", "gemm fp32"}
    assert sum(sample["seconds"] for entry in subjects.values() for sample in entry["rounds"]) < wall_seconds
    for entry in subjects.values():
        seconds = [sample["seconds"] for sample in entry["rounds"]]
        assert len(set(seconds)) == 3, "a clock never gives the same number three times"
        assert entry["tokens_per_second"] == pytest.approx(4 * 32 / statistics.median(seconds))
        assert 0 < entry["start_seconds"] < wall_seconds
        assert entry["peak_memory_bytes"] > 50 * 2**20, "torch alone holds more"
    ours, plain = subjects["ours fp32"], subjects["plain fp32"]
    assert ours["num_parameters"] == plain["num_parameters"] > 0
    for our_sample, plain_sample in zip(ours["rounds"], plain["rounds"], strict=True):
        assert our_sample["loss"] == pytest.approx(plain_sample["loss"], rel=1e-5)
        assert our_sample["cpu_seconds"] > 0
    (found_ratio,) = found["ratios"]
    by_round = [their["seconds"] / our["seconds"] for our, their in zip(ours["rounds"], plain["rounds"], strict=True)]
    assert found_ratio["median"] == pytest.approx(statistics.median(by_round))
    for entry in (ours, plain):
        assert {cost["name"] for cost in entry["costs"]} & {"aten::mm", "aten::addmm"}
    assert "plain fp32" in finished.stdout
    assert "GEMM rate" in finished.stdout


@pytest.mark.slow
def test_two_ranks_beside_one(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    finished = bench(*TINY, "--modes", "dp", "--rounds", "2", "--json", str(output))
    assert finished.returncode == 0, finished.stderr
    one, two = json.loads(output.read_text())["subjects"]
    assert (one["subject"]["num_processes"], two["subject"]["num_processes"]) == (1, 2)
    for first, second in zip(one["rounds"], two["rounds"], strict=True):
        assert first["num_tokens"] == second["num_tokens"]
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-2)


def test_failed_subject_ends_the_run_with_its_log() -> None:
    finished = bench(*TINY, "model.normalization=LayerNorm", "--modes", "fp32", "--rounds", "1")
    assert finished.returncode == 1
    assert "subject 'plain fp32' ended while it started" in finished.stderr
    assert "the plain model has no model.normalization=LayerNorm" in finished.stderr


def test_wrong_config_ends_with_code_2() -> None:
    finished = bench("model.hiden_size=64")
    assert finished.returncode == 2
    assert "model.hidden_size" in finished.stderr


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['bench.py', '--help']; sys.path.insert(0, 'tools'); sys.modules['torch'] = None\n"
        "import runpy; runpy.run_path('tools/bench.py', run_name='__main__')"
    )
    finished = run([sys.executable, "-c", code])
    assert finished.returncode == 0, finished.stderr
    assert "--rounds" in finished.stdout


def result(name: str, tokens_per_second: list[float], is_short: bool = False) -> SubjectResult:
    implementation, precision = name.split()
    subject = Subject(name, implementation, precision, 1, 1)  # type: ignore[arg-type]
    rounds = [Sample(1 / speed, 1, None, 0.5 / speed, 0.0) for speed in tokens_per_second]
    return SubjectResult(subject, 0.0, None, rounds=rounds, is_short=is_short)


def test_ratio_is_taken_round_by_round() -> None:
    # The machine was three times slower in the second round; each round knows the true ratio, 2.
    results = [result("ours fp32", [60.0, 20.0, 60.0]), result("plain fp32", [30.0, 10.0, 20.0])]
    found = ratio(Comparison("ours fp32", "plain fp32", 2.5), results)
    assert (found.median, found.lowest, found.highest) == pytest.approx((2.0, 2.0, 3.0))
    assert found.by_cpu_time == pytest.approx(2.0)
    assert found.is_reached is False
    assert ratio(Comparison("ours fp32", "plain fp32", None), results).is_reached is None


def test_subject_measured_once_is_compared_with_every_round() -> None:
    results = [result("ours bf16", [60.0, 20.0]), result("plain bf16", [10.0], is_short=True)]
    assert ratio(Comparison("ours bf16", "plain bf16", 1.0), results).median == pytest.approx(4.0)


def test_ceiling_is_the_fastest_usable_gemm_on_as_many_threads() -> None:
    gemms = [result("gemm fp32", [100.0]), result("gemm bf16", [300.0])]
    assert ceiling(gemms, Subject("", "ours", "fp32", 1, 1)) == pytest.approx(100.0)
    assert ceiling(gemms, Subject("", "ours", "fp8", 1, 1)) == pytest.approx(300.0)
    assert ceiling(gemms, Subject("", "ours", "bf16", 2, 1)) is None
    assert ceiling([], Subject("", "ours", "bf16", 1, 1)) is None
    assert ceiling(gemms, gemms[0].subject) is None


def test_plan_names_every_comparison_once() -> None:
    plan = make_plan(["fp32", "bf16", "fp8", "dp"], 2)
    names = [subject.name for subject in plan.subjects]
    assert len(names) == len(set(names))
    targets = {(c.faster, c.slower): c.target for c in plan.comparisons}
    assert targets["ours fp32", "plain fp32"] == 1.0
    assert targets["ours bf16", "plain bf16"] == 1.0
    assert targets["ours fp8", "ours bf16"] == 0.75
    assert targets["ours bf16, dp 2 x 1 thread", "ours bf16, 1 thread"] == 1.6
    assert {name for pair in targets for name in pair} <= set(names)
