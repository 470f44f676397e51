"""The loss of a checkpoint on token files is that of transformers' log-probabilities in FP64, on any layout."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp8.checkpoint.saved_model import InferenceSettings
from megatron_fp8.commands.evaluate import main
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.evaluate.file_loss import FileLoss
from tests.e2e.launch import ROOT, run
from tests.evaluate.conftest import Measured
from tests.evaluate.models import FP32, SEQ_LENGTH, measured
from tests.ranks import run_on_ranks

# In nats per token: both compute in FP32, with sums in other orders.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reference(measured_model: Measured) -> dict[str, tuple[float, int]]:
    """(sum of the losses in FP64, tokens) of each file by transformers' model, window by window."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(measured_model.exported, dtype=torch.float32).eval()
    tokenizer = Tokenizer.load(measured_model.files / "tokenizer.json")
    sums = {}
    for name, documents in measured_model.texts.items():
        text = [token for document in documents for token in [*tokenizer.encode(document), tokenizer.eod_id]]
        total = 0.0
        for start in range(0, len(text), SEQ_LENGTH):
            labels = torch.tensor(text[start : start + SEQ_LENGTH])
            given = torch.tensor([tokenizer.eod_id, *text][start : start + len(labels)])
            with torch.no_grad():
                log_probabilities = model(given[None]).logits[0].double().log_softmax(dim=-1)
            total -= float(log_probabilities.gather(1, labels[:, None]).sum())
        sums[name] = (total, len(text))
    return sums


def prefixes(model: Measured) -> list[str]:
    return [str(model.files / name) for name in model.texts]


def test_losses_are_those_of_transformers(measured_model: Measured, reference: dict[str, tuple[float, int]]) -> None:
    (losses,) = run_on_ranks(1, measured, measured_model.run, prefixes(measured_model), FP32)
    assert [loss.name for loss in losses] == list(reference)
    for loss in losses:
        total, num_tokens = reference[loss.name]
        num_bytes = len("".join(measured_model.texts[loss.name]).encode())
        assert (loss.num_tokens, loss.num_bytes) == (num_tokens, num_bytes)
        assert loss.num_tokens % SEQ_LENGTH, "a tail is there"
        assert loss.loss == pytest.approx(total / num_tokens, abs=TOLERANCE)
        assert loss.perplexity == pytest.approx(math.exp(total / num_tokens), rel=TOLERANCE)
        assert loss.bits_per_byte == pytest.approx(total / math.log(2) / num_bytes, rel=TOLERANCE)
    everything = FileLoss.total(losses)
    assert everything.num_tokens == sum(pair[1] for pair in reference.values())
    assert everything.loss == pytest.approx(
        sum(pair[0] for pair in reference.values()) / everything.num_tokens, abs=TOLERANCE
    )


@pytest.mark.parametrize(
    "settings",
    [
        InferenceSettings(mode="fp32", tensor_model_parallel_size=2, micro_batch_size=3),
        InferenceSettings(mode="fp32", micro_batch_size=4),
        InferenceSettings(mode="fp32", pipeline_model_parallel_size=2, num_microbatches=4),
    ],
    ids=["tp2", "dp2", "pp2"],
)
def test_any_layout_counts_each_token_once(
    measured_model: Measured, reference: dict[str, tuple[float, int]], settings: InferenceSettings
) -> None:
    for losses in run_on_ranks(2, measured, measured_model.run, prefixes(measured_model), settings):
        for loss in losses:
            total, num_tokens = reference[loss.name]
            assert loss.num_tokens == num_tokens
            assert loss.loss == pytest.approx(total / num_tokens, abs=TOLERANCE)


def test_other_formats_are_near_and_other(measured_model: Measured, reference: dict[str, tuple[float, int]]) -> None:
    """BF16, and FP8 with the scales of the run (delayed) and with scales of its own."""
    seen = set()
    for settings in (
        InferenceSettings(mode="bf16"),
        InferenceSettings(mode="fp8"),
        InferenceSettings(mode="fp8", fp8_recipe="tensorwise"),
    ):
        ((loss,),) = run_on_ranks(1, measured, measured_model.run, prefixes(measured_model)[:1], settings)
        exact = reference["one"][0] / reference["one"][1]
        assert loss.loss == pytest.approx(exact, abs=0.02)
        assert abs(loss.loss - exact) > TOLERANCE
        seen.add(loss.loss)
    assert len(seen) == 3


def test_some_windows_and_the_runs_own_files(measured_model: Measured) -> None:
    (whole,) = run_on_ranks(1, measured, measured_model.run, [], FP32)[0]
    ((some,),) = run_on_ranks(1, measured, measured_model.run, [], FP32, 3)
    assert whole.name == some.name == "one"
    assert (some.num_windows, some.num_tokens, some.num_bytes) == (3, 3 * SEQ_LENGTH, None)
    assert some.bits_per_byte is None
    assert some.num_windows < whole.num_windows


def evaluate(*arguments: Any, cwd: Path) -> Any:
    return run([sys.executable, ROOT / "tools" / "evaluate.py", *arguments], cwd)


def test_the_program_shows_a_table_and_writes_json(
    measured_model: Measured, reference: dict[str, tuple[float, int]], tmp_path: Path
) -> None:
    arguments = ["--precision", "fp32", "--json", "out.json", "--data", *prefixes(measured_model)]
    ended = evaluate(measured_model.run, *arguments, cwd=tmp_path)
    assert ended.code == 0, ended.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["precision"] == "fp32"
    for name, (total, num_tokens) in reference.items():
        row = found["data"][name]
        assert row["tokens"] == num_tokens
        assert row["loss"] == pytest.approx(total / num_tokens, abs=TOLERANCE)
        assert f"{row['loss']:.6f}" in ended.stdout
        assert f"{row['bits_per_byte']:.4f}" in ended.stdout
    assert f"{found['total']['tokens']:,}" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "said", "unsaid"),
    [
        (["RUN", "--data", "FILES/one", "FILES/none"], "none.idx does not exist", "FILES/one"),
        (["RUN", "--data", "FILES/one", "FILES/one"], "duplicate prefix", "exist"),
        (["RUN", "--tokenizer", "FILES/nothing.json"], "nothing.json does not exist", "--data"),
        (["FILES/nowhere"], "there is no checkpoint at", "--data"),
        (["RUN", "--tensor-model-parallel-size", "2"], "tensor_model_parallel_size", "--data"),
    ],
)
def test_mistakes_are_told_before_anything_is_read(
    measured_model: Measured, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str, unsaid: str
) -> None:
    places = {"RUN": str(measured_model.run), "FILES": str(measured_model.files)}
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
        unsaid = unsaid.replace(name, place)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert unsaid not in told
