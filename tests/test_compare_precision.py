"""The comparison compares what it says: equal weights and samples in every mode, differences by seed, honest words."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.formats.comparison import (
    OPERANDS,
    Comparison,
    OperandNoise,
    RunResult,
    RunTask,
    collect,
    difference,
    last_mean,
    seed_spread,
)
from benchmarks.formats.plan import MODES, PlanError, PrepareTask, default_reference, make_plan

from megatron_fp8.config.load import load_config, process_environment
from megatron_fp8.prepare import quickstart
from megatron_fp8.prepare.quickstart import Document
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "compare.yaml"
NUM_STEPS = 6
SENTENCE = "the scale of this tensor is the largest number of the format over the largest number of the history"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that make the config so small that a step takes milliseconds, with data of its own."""
    data = tmp_path_factory.mktemp("compare") / "data"
    words, generator = SENTENCE.split(), random.Random(0)
    texts = [Document(f"document{n}", " ".join(generator.choices(words, k=150)) + "\n") for n in range(60)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "read_corpus", lambda: texts)
        quickstart.prepare(data, 300, lambda *step: None)
    return [
        "model.num_layers=2",
        "model.hidden_size=64",
        "model.num_attention_heads=4",
        "model.ffn_hidden_size=96",
        "model.seq_length=32",
        "model.vocab_size=384",
        "training.micro_batch_size=2",
        "training.global_batch_size=4",
        f"training.train_iters={NUM_STEPS}",
        "training.eval_iters=0",
        "optimizer.lr_warmup_iters=1",
        f"data.train_data_path=[{data}/train]",
        f"data.tokenizer_model={data}/tokenizer.json",
    ]


def trained(overrides: list[str], modes: list[str], directory: Path) -> tuple[list[RunResult], dict[str, list[float]]]:
    """Each of the modes in this process, and what the samples' file holds."""
    from benchmarks.formats.worker import prepare, run_task
    from benchmarks.runs import Samples
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    path = directory / "samples.pt"
    prepare(PrepareTask(CONFIG, tuple(overrides), {7: path}))
    results = []
    for mode in modes:
        FP8GlobalStateManager.reset()
        initialize_rng_tracker(force_reset=True)
        changes = (*overrides, *MODES[mode].overrides, "training.seed=7")
        results.append(run_task(RunTask(mode, 7, CONFIG, changes, path, 1), lambda number: None))
        if MODES[mode].torchao_recipe is None:
            parallel_state.destroy_model_parallel()
    samples = Samples.load(path)
    return results, {"rates": samples.learning_rates, "shape": list(samples.fields["tokens"].shape)}


def test_modes_train_the_same_model_on_the_same_samples(tiny: list[str], tmp_path: Path) -> None:
    modes = ["fp32", "bf16", "fp8-delayed", "fp8-tensorwise", "fp8-tensorwise", "torchao-tensorwise", "torchao-rowwise"]
    ((results, samples),) = run_on_ranks(1, trained, tiny, modes, tmp_path)
    assert samples["shape"] == [NUM_STEPS * 4, 32]
    assert samples["rates"][:2] == [0.0, pytest.approx(3e-3)], "one step of warm-up"
    fp32, bf16, delayed, tensorwise, again, torchao, rowwise = results
    assert tensorwise.losses == again.losses, "bit for bit"
    assert tensorwise.operands == again.operands
    for result in results:
        assert len(result.losses) == NUM_STEPS
        assert result.num_parameters == fp32.num_parameters
        assert result.skipped == []
        assert result.losses[0] == pytest.approx(fp32.losses[0], rel=2e-3), "the weights that the seed gives"
        assert result.losses == pytest.approx(fp32.losses, rel=2e-2)
        assert result.losses[-1] < result.losses[0] - 0.3, "it learns"
    numbers = [result.losses for result in (fp32, bf16, delayed, tensorwise, torchao, rowwise)]
    assert len({tuple(losses) for losses in numbers}) == len(numbers), "no two modes round alike"
    assert fp32.operands == bf16.operands == {}
    names = {f"layers.{layer}/{operand}" for layer in range(2) for operand in OPERANDS}
    for result in (delayed, tensorwise, torchao, rowwise):
        assert set(result.operands) == names
    for name in names:
        # E4M3 has 3 bits of mantissa, E5M2 2: 6 dB apart. Both cast tensorwise, of nearly the same tensors.
        expected = 25.5 if name.endswith("grad_output") else 31.5
        for result in (tensorwise, torchao):
            assert result.operands[name].sqnr_db == pytest.approx(expected, abs=1.5), (result.mode, name)
        assert torchao.operands[name].sqnr_db == pytest.approx(tensorwise.operands[name].sqnr_db, abs=0.5), name
        # Rowwise is E4M3 in both passes.
        assert rowwise.operands[name].sqnr_db == pytest.approx(31.5, abs=1.5), name


def torchao_noise(config_name: str, kind: str) -> tuple[float, float, float]:
    """Of a known matrix: what the meter finds, and the same from torch's own cast."""
    import torch
    from benchmarks.formats.torchao_run import import_float8, quantize

    from megatron_fp8.precision.tensor_health import TensorHealth, quantization_sums

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 64, generator=generator) * torch.logspace(-4, 4, 8)[:, None]
    config = import_float8().Float8LinearConfig.from_recipe_name(config_name)
    health = TensorHealth.from_sums(quantization_sums(*quantize(x, config, kind)).tolist())
    amax = x.abs().amax() if config_name == "tensorwise" else x.abs().amax(dim=1, keepdim=True)
    scale = 448 / amax
    if config_name == "rowwise":
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    q = (x * scale).to(torch.float8_e4m3fn).float() / scale
    return health.sqnr_db, float(20 * torch.log10(x.norm() / (q - x).norm())), health.flushed


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchao_operands_are_measured_with_the_recipe_s_scales(recipe: str) -> None:
    ((measured, expected, flushed),) = run_on_ranks(1, torchao_noise, recipe, "input")
    assert measured == pytest.approx(expected, abs=1e-3)
    assert (flushed > 0.1) == (recipe == "tensorwise"), (
        "rows of 1e-4 beside rows of 1e4 are lost without their own scale"
    )


def test_differences_are_paired_by_seed() -> None:
    reference = {1: 3.0, 2: 3.4, 3: 3.2}
    found = difference("m", {1: 3.1, 2: 3.5, 3: 3.15}, "fp32", reference)
    assert found.by_seed == pytest.approx({1: 0.1, 2: 0.1, 3: -0.05})
    assert (found.mean, found.lowest, found.highest) == pytest.approx((0.05, -0.05, 0.1))
    assert found.spread == pytest.approx(0.2), "standard deviation of 3.0, 3.4, 3.2 with n - 1"
    assert found.is_larger_than_spread is False
    assert found.verdict == "m differs from fp32 by +0.0500 nats, within the seed-to-seed spread 0.2000"
    with pytest.raises(ValueError, match="seeds"):
        difference("m", {1: 3.1}, "fp32", reference)


@pytest.mark.parametrize(
    ("numbers", "is_larger", "ending"),
    [
        ({1: 3.3, 2: 3.7, 3: 3.5}, True, "larger than the seed-to-seed spread 0.2000 at every seed"),
        ({1: 3.1, 2: 4.4, 3: 3.3}, True, "larger than the seed-to-seed spread 0.2000 on average, not at every seed"),
        ({1: 2.7, 2: 3.1, 3: 2.9}, True, "larger than the seed-to-seed spread 0.2000 at every seed"),
        ({1: 3.0, 2: math.nan, 3: 3.2}, True, "m has diverged: a loss is not finite"),
    ],
)
def test_verdicts(numbers: dict[int, float], is_larger: bool, ending: str) -> None:
    found = difference("m", numbers, "fp32", {1: 3.0, 2: 3.4, 3: 3.2})
    assert found.is_larger_than_spread is is_larger
    assert found.verdict.endswith(ending)


def test_what_is_unknown_is_said_to_be() -> None:
    assert seed_spread({1: 3.0}) is None
    single = difference("m", {1: 3.1}, "fp32", {1: 3.0})
    assert single.is_larger_than_spread is None
    assert single.verdict.endswith("; one seed has no spread")
    assert last_mean([9.0, 1.0, 2.0], 2) == 1.5
    assert math.isnan(last_mean([1.0, math.inf, 2.0], 2))
    assert default_reference(["fp8-delayed", "bf16"]) == "bf16"


def result(mode: str, seed: int, losses: list[float], sqnr_db: float | None = None) -> RunResult:
    operands = {} if sqnr_db is None else {"layers.0/fc1/input": OperandNoise(sqnr_db, 0.0, 0.0)}
    return RunResult(mode, seed, losses, [], operands, 10, 1.0)


def test_mode_without_every_seed_is_left_out() -> None:
    results = [result("fp32", 1, [3.0]), result("fp32", 2, [3.2]), result("bf16", 2, [3.0])]
    assert list(collect(results, ["bf16", "fp32"], [1, 2])) == ["fp32"]


def test_json_and_pictures_of_a_run_that_diverged(tmp_path: Path) -> None:
    from benchmarks.formats.pictures import draw_losses, draw_sqnr

    results = [
        *(result("fp32", seed, [4.0, 3.0 + seed]) for seed in (1, 2)),
        *(result("fp8-delayed", seed, [4.0, math.nan], sqnr_db=20.0 + seed) for seed in (1, 2)),
    ]
    config = load_config(CONFIG).config
    runs = collect(results, ["fp32", "fp8-delayed"], [1, 2])
    comparison = Comparison(config, "a machine", "fp32", 1, 1, runs)
    assert comparison.operand_sqnr("fp8-delayed") == {"fc1/input": 21.5}
    found = json.loads(json.dumps(comparison.as_json(), allow_nan=False))
    assert found["differences"]["fp8-delayed"]["verdict"] == "fp8-delayed has diverged: a loss is not finite"
    assert found["runs"][-1]["losses"] == [4.0, "nan"]
    draw_losses(comparison, tmp_path / "losses.png")
    draw_sqnr(comparison, tmp_path / "sqnr.png")
    assert all((tmp_path / name).stat().st_size > 5_000 for name in ("losses.png", "sqnr.png"))


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**process_environment(), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tools" / "compare_precision.py"), "--threads", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_two_modes_from_the_command_line(tiny: list[str], tmp_path: Path) -> None:
    output = tmp_path / "made" / "here"
    modes = ["--modes", "bf16", "fp8-tensorwise"]
    finished = compare(*tiny, "training.train_iters=2", "--quick", *modes, "--out", str(output))
    assert finished.returncode == 0, finished.stderr
    assert "fp8-tensorwise differs from bf16 by" in finished.stdout
    assert "one seed has no spread" in finished.stdout
    assert "\x1b" not in finished.stdout, "no colours in a pipe"
    assert "2 of 2: fp8-tensorwise, seed 1234: last loss" in finished.stderr
    assert {path.name for path in output.iterdir()} == {"comparison.json", "losses.png", "sqnr.png"}
    found = json.loads((output / "comparison.json").read_text())
    bf16, fp8 = found["runs"]
    assert (bf16["mode"], fp8["mode"]) == ("bf16", "fp8-tensorwise")
    assert len(bf16["losses"]) == 2
    difference_in_file = found["differences"]["fp8-tensorwise"]
    assert difference_in_file["mean"] == pytest.approx(fp8["losses"][-1] - bf16["losses"][-1])
    assert set(found["sqnr_db"]["fp8-tensorwise"]) == set(OPERANDS)
    assert found["versions"]["torch"]
    assert found["config"]["training"]["train_iters"] == 2


def test_mode_that_the_rules_refuse_ends_before_anything_runs(tiny: list[str]) -> None:
    finished = compare(*tiny, "model.ffn_hidden_size=112", "--modes", "bf16", "fp8-mxfp8", "fp8-tensorwise")
    assert finished.returncode == 2
    assert "in fp8-mxfp8: model.ffn_hidden_size = 112" in finished.stderr
    assert "FP8 needs a multiple of 32 inner features" in finished.stderr
    assert "in fp8-tensorwise" not in finished.stderr
    assert "1 mistake in" in finished.stderr


def test_missing_data_says_how_to_make_it(tiny: list[str]) -> None:
    with pytest.raises(PlanError, match=r"data\.tokenizer_model") as caught:
        make_plan(CONFIG, [*tiny, "data.tokenizer_model=nowhere/tokenizer.json"], ["bf16"], 1)
    assert "tools/prepare_quickstart.py --output data/quickstart" in str(caught.value)


def test_torchao_s_model_is_asked_before_anything_runs(tiny: list[str]) -> None:
    wrong = [*tiny, "model.normalization=LayerNorm", "data.eod_mask_loss=true", "data.reset_attention_mask=true"]
    make_plan(CONFIG, wrong, ["bf16"], 1)
    with pytest.raises(PlanError, match=r"in torchao-rowwise(.|\n)*Norm(.|\n)*eod_mask_loss(.|\n)*reset_attention"):
        make_plan(CONFIG, wrong, ["bf16", "torchao-rowwise"], 1)


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['compare_precision.py', '--help']; sys.path.insert(0, 'tools')\n"
        "sys.modules['torch'] = None\n"
        "import runpy; runpy.run_path('tools/compare_precision.py', run_name='__main__')"
    )
    environment = {**process_environment(), "PYTHONPATH": str(ROOT)}
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "--reference" in finished.stdout


@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--modes", "fp4"], ["--modes", "bf16", "--reference", "fp32"]])
def test_wrong_options_end_with_code_2(wrong: list[str]) -> None:
    finished = compare(*wrong)
    assert finished.returncode == 2
    assert wrong[-1] in finished.stderr
