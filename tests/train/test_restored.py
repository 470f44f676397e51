"""What is changed for a while is put back, also when something goes wrong meanwhile."""

from __future__ import annotations

import time
from typing import Any

import pytest

from megatron_fp8.train.state import EVALUATE, Pace
from tests.ranks import run_on_ranks
from tests.small_run import batches, run_small, small_config


def after_a_broken_evaluation(parts: Any) -> dict[str, Any]:
    """What an evaluation leaves that ends in the middle of a forward pass."""
    import torch

    histories = [state.amax_history.clone() for state in parts.precision.scaling_states()]
    layers = list(parts.precision.layers.values())

    def fail(*_: Any) -> None:
        raise ConnectionError("the disk has gone")

    hook = layers[-1].register_forward_hook(fail)
    with pytest.raises(ConnectionError, match="the disk"):
        parts.stepper.evaluate(batches(parts), parts.batches.shape)
    hook.remove()
    same = [
        torch.equal(before, state.amax_history)
        for before, state in zip(histories, parts.precision.scaling_states(), strict=True)
    ]
    return {
        "trains": all(chunk.training for chunk in parts.chunks),
        "gradients": torch.is_grad_enabled(),
        "histories": same,
        "runs in fp8": parts.precision.runs_in_fp8(0) and not parts.precision._without_fp8,
    }


@pytest.mark.parametrize("evaluate_fp8", [True, False])
def test_an_evaluation_that_fails_leaves_training_as_it_was(evaluate_fp8: bool) -> None:
    precision = {"mode": "fp8", "fp8_amax_history_len": 4, "fp8_eval": evaluate_fp8}
    config = small_config(model={"num_layers": 1}, precision=precision, training={"global_batch_size": 2})
    (record,) = run_on_ranks(1, run_small, config, 1, after_a_broken_evaluation)
    left = record.probe
    assert left["trains"]
    assert left["gradients"]
    assert left["runs in fp8"]
    assert left["histories"]
    assert all(left["histories"])


def test_a_pause_that_fails_is_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    pace = Pace(num_steps=1)

    def save() -> None:
        with pace.paused(EVALUATE):
            now[0] += 7
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        save()
    pace.step_done()
    now[0] += 2
    timing = pace.take_interval()
    assert (timing.seconds, timing.pauses) == (2, {EVALUATE: 7})
