"""A checkpoint of a run that kept documents apart is measured so: transformers' losses of the documents one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp8.checkpoint.saved_model import InferenceSettings, read_saved_model
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.device import prepare
from tests.evaluate.conftest import Measured
from tests.evaluate.models import FP32, SEQ_LENGTH
from tests.ranks import run_on_ranks


def loss_of(run: Path, prefix: str, settings: InferenceSettings, *, apart: bool) -> float:
    """Nats per token by the model of `run`."""
    from megatron.core import parallel_state

    from megatron_fp8.evaluate.file_loss import measure_files
    from megatron_fp8.evaluate.files import evaluation_files, model_tokenizer
    from megatron_fp8.generate.loaded_model import load_model

    saved = read_saved_model(run, settings, torch.distributed.get_world_size())
    data = saved.config.data.model_copy(update={"reset_attention_mask": apart})
    saved = replace(saved, config=saved.config.model_copy(update={"data": data}))
    model = load_model(saved, prepare())
    (loss,) = measure_files(model, evaluation_files(saved, [prefix]), model_tokenizer(saved, None))
    parallel_state.destroy_model_parallel()
    return float(loss.loss)


def losses_of(*arguments: Any) -> tuple[float, float]:
    """With documents apart, and without."""
    return loss_of(*arguments, apart=True), loss_of(*arguments, apart=False)


@pytest.fixture(scope="module")
def expected(measured_model: Measured) -> float:
    """Nats per token of the file `one`, by transformers' model in windows cut after each end of a document."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(measured_model.exported, dtype=torch.float32).eval()
    tokenizer = Tokenizer.load(measured_model.files / "tokenizer.json")
    text = [token for each in measured_model.texts["one"] for token in [*tokenizer.encode(each), tokenizer.eod_id]]
    given = [tokenizer.eod_id, *text]
    total, start = 0.0, 0
    for place in range(len(text)):
        window_ends = (place + 1) % SEQ_LENGTH == 0 or place + 1 == len(text)
        if not window_ends and given[place] != tokenizer.eod_id:
            continue
        piece = torch.tensor(given[start : place + 1])
        with torch.no_grad():
            log_probabilities = model(piece[None]).logits[0].double().log_softmax(dim=-1)
        labels = torch.tensor(text[start : place + 1])
        total -= float(log_probabilities.gather(1, labels[:, None]).sum())
        start = place + 1
    assert start == len(text)
    return total / len(text)


@pytest.mark.parametrize(
    "settings",
    [FP32, InferenceSettings(mode="fp32", pipeline_model_parallel_size=2, num_microbatches=4)],
    ids=["one rank", "pp2"],
)
def test_losses_are_those_of_documents_one_by_one(
    measured_model: Measured, expected: float, settings: InferenceSettings
) -> None:
    ranks = settings.pipeline_model_parallel_size
    prefix = str(measured_model.files / "one")
    for apart, together in run_on_ranks(ranks, losses_of, measured_model.run, prefix, settings):
        assert apart == pytest.approx(expected, abs=1e-5)
        assert abs(together - expected) > 1e-4
