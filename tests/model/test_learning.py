"""The stack learns: one batch can be learnt by heart, in every precision."""

from __future__ import annotations

import pytest

from tests.ranks import run_on_ranks
from tests.small_run import run_small, small_config


def overfit(mode: str) -> list[float]:
    config = small_config(
        precision={"mode": mode, "fp8_amax_history_len": 8},
        training={"micro_batch_size": 4, "global_batch_size": 4, "train_iters": 80},
        optimizer={"lr": 1e-2, "weight_decay": 0.0},
    )
    return [step.loss for step in run_small(config, 80).steps]


@pytest.mark.parametrize("mode", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), "fp8"])
def test_one_batch_is_learnt_by_heart(mode: str) -> None:
    (losses,) = run_on_ranks(1, overfit, mode)
    assert losses[0] == pytest.approx(5.52, abs=0.1), "ln(250) at the start"
    assert losses[-1] < 0.1
