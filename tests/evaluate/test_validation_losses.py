"""Losses of validation sets are those of an independent computation, the same in every layout; nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from megatron_fp8.config.schema import Config
from tests.checkpoint.training import derived_layout, state_hashes
from tests.ranks import run_on_ranks
from tests.small_run import VOCAB_SIZE, batches, small_config

SEQ_LENGTH = 16
EOD = 3
# Windows of the last file do not fill its last global batch.
NUM_TOKENS = {"first": 70, "second": 16 * 8, "third": 5}
WEIGHTS = {"first": 0.5, "second": 0.2, "third": 0.3}


def config_of(weighted: bool = False, mode: str = "fp32", **parallel: Any) -> Config:
    micro_batch_size = parallel.pop("micro_batch_size", 2)
    return small_config(
        model={"num_layers": 2, "seq_length": SEQ_LENGTH},
        precision={"mode": mode},
        parallel=parallel,
        training={
            "micro_batch_size": micro_batch_size,
            "global_batch_size": 4,
            "multiple_validation_sets": True,
            "full_validation": True,
        },
    )


def tokens_of(name: str) -> list[int]:
    import numpy as np

    generator = np.random.default_rng(NUM_TOKENS[name])
    return generator.integers(0, VOCAB_SIZE, size=NUM_TOKENS[name]).tolist()


def sets_of(config: Config, directory: str, weighted: bool, reads_data: bool) -> Any:
    from megatron_fp8.data.blend import Blend
    from megatron_fp8.data.validation import whole_sets

    blend = Blend(tuple(f"{directory}/{name}" for name in NUM_TOKENS), tuple(WEIGHTS.values()) if weighted else None)
    return whole_sets(config, blend, EOD, reads_data)


def evaluated(
    config: Config, directory: str, weighted: bool = False, steps: int = 0
) -> tuple[dict[str, Any], dict[str, str], dict[str, str], Any]:
    """(record, state before, state after, reference losses by name) of an evaluation on this rank."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    from megatron_fp8 import device as devices
    from megatron_fp8.report.record import Recorder
    from megatron_fp8.train.evaluate import evaluate
    from megatron_fp8.train.setup import build_parts
    from megatron_fp8.train.state import TrainState

    initialize_rng_tracker(force_reset=True)
    parts = build_parts(config, derived_layout(config), VOCAB_SIZE, devices.prepare(), Recorder([]))
    for _ in range(steps):
        parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
    before = state_hashes(parts)
    sets = sets_of(config, directory, weighted, parts.batches.reads_data)
    _, events = evaluate(parts.stepper, parts.batches, sets, TrainState(iteration=7))
    after = state_hashes(parts)
    alone = torch.distributed.get_world_size() == 1
    reference = {name: reference_loss(parts, tokens_of(name)) for name in NUM_TOKENS} if alone else None
    parallel_state.destroy_model_parallel()
    ((event, values),) = events
    record = {"event": event, **values}
    return record, before, after, reference


def reference_loss(parts: Any, text: list[int]) -> tuple[float, int]:
    """(sum of losses in FP64, number of tokens), window by window from the model's logits."""
    import torch

    stage = parts.chunks[0].module.eval()
    total = 0.0
    for start in range(0, len(text), SEQ_LENGTH):
        labels = text[start : start + SEQ_LENGTH]
        given = ([EOD, *text][start : start + SEQ_LENGTH] + [0] * SEQ_LENGTH)[:SEQ_LENGTH]
        with torch.no_grad():
            device = parts.device.torch_device
            tokens, places = torch.tensor([given], device=device), torch.arange(SEQ_LENGTH, device=device)[None]
            logits = stage(tokens, places)[:, 0].double()
        log_probabilities = torch.log_softmax(logits[:, :VOCAB_SIZE], dim=-1)
        total -= sum(float(log_probabilities[place, label]) for place, label in enumerate(labels))
    stage.train()
    return total, len(text)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    import numpy as np

    from megatron_fp8.prepare.token_file_writer import TokenFileWriter

    path = tmp_path_factory.mktemp("validation")
    for name in NUM_TOKENS:
        with TokenFileWriter(path / name, VOCAB_SIZE) as writer:
            tokens = np.array(tokens_of(name), dtype=writer.dtype)
            half = len(tokens) // 2
            writer.add_documents(tokens, [half, len(tokens) - half])
    return str(path)


@cache
def one_rank(directory: str, weighted: bool) -> tuple[dict[str, Any], dict[str, str], dict[str, str], Any]:
    (result,) = run_on_ranks(1, evaluated, config_of(micro_batch_size=4), directory, weighted)
    return result


def series(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith("lm loss validation")}


@pytest.mark.parametrize("weighted", [False, True])
def test_losses_are_those_of_log_probabilities_in_fp64(directory: str, weighted: bool) -> None:
    record, _, _, reference = one_rank(directory, weighted)
    assert record["event"] == "validation"
    assert record["iteration"] == 7
    expected = {name: loss_sum / count for name, (loss_sum, count) in reference.items()}
    for name, loss in expected.items():
        assert record[f"lm loss validation/{name}"] == pytest.approx(loss, abs=1e-6)
        assert record[f"lm loss validation ppl/{name}"] == math.exp(record[f"lm loss validation/{name}"])
    if weighted:
        total = sum(WEIGHTS[name] * loss for name, loss in expected.items())
    else:
        total = sum(pair[0] for pair in reference.values()) / sum(pair[1] for pair in reference.values())
    assert record["lm loss validation"] == pytest.approx(total, abs=1e-6)
    assert record["lm loss validation ppl"] == pytest.approx(math.exp(total), rel=1e-6)
    assert len(series(record)) == 2 + 2 * len(NUM_TOKENS)


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, {"micro_batch_size": 1}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (2, {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}),
    ],
    ids=["dp2", "tp2", "pp2"],
)
def test_every_layout_has_the_same_losses(directory: str, world_size: int, parallel: dict[str, Any]) -> None:
    """Up to the order in which a layout's kernels add FP32 numbers; all ranks have the same bits."""
    expected = series(one_rank(directory, False)[0])
    records = [series(result[0]) for result in run_on_ranks(world_size, evaluated, config_of(**parallel), directory)]
    assert all(record == records[0] for record in records)
    assert records[0] == pytest.approx(expected, rel=1e-6 if "tensor_model_parallel_size" in parallel else 1e-7)


@pytest.mark.parametrize("mode", ["fp32", "fp8"])
def test_all_of_the_training_state_is_left_alone(directory: str, mode: str) -> None:
    """Scales, running amaxes and generators too: with them the next step would be another one."""
    for _, before, after, _ in run_on_ranks(2, evaluated, config_of(mode=mode), directory, False, 2):
        assert before == after
        assert len(before) > 20
