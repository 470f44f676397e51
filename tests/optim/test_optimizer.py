"""Parameter groups and schedules against formulas of their own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import run_on_ranks
from tests.small_run import run_small, small_config


def decays(parts) -> dict[str, float]:
    """Weight decay of every parameter, by global name (FP32 mode: the optimizer holds the parameters themselves)."""
    from megatron_fp8.model.build import global_parameters

    by_parameter = {
        id(parameter): group["weight_decay"] for group in parts.optimizer.param_groups for parameter in group["params"]
    }
    return {name: by_parameter[id(parameter)] for name, parameter in global_parameters(parts.chunks)}


def test_norms_and_biases_are_not_decayed() -> None:
    config = small_config(
        model={"add_bias_linear": True, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute"},
        parallel={"use_distributed_optimizer": False},
        optimizer={"weight_decay": 0.1},
    )
    (record,) = run_on_ranks(1, run_small, config, 0, decays)
    assert len(record.probe) > 20
    for name, decay in record.probe.items():
        undecayed = "layer_norm_" in name or "final_norm" in name or name.endswith("bias")
        assert decay == (0.0 if undecayed else 0.1), name


def learning_rates(optimizer: dict[str, Any], train_iters: int = 100) -> list[float]:
    from megatron_fp8.optim.optimizer import build_schedule

    config = small_config(training={"train_iters": train_iters}, optimizer=optimizer)
    stand_in = SimpleNamespace(param_groups=[{"params": []}])
    schedule = build_schedule(config, stand_in)
    rates = []
    for _ in range(train_iters + 1):
        rates.append(stand_in.param_groups[0]["lr"])
        schedule.step(1)
    return rates


@pytest.mark.parametrize(
    ("style", "at"),
    [
        ("cosine", lambda share: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))),
        ("linear", lambda share: 0.1 + 0.9 * (1 - share)),
        ("constant", lambda share: 1.0),
    ],
)
def test_warm_up_then_decay(style: str, at) -> None:
    (rates,) = run_on_ranks(
        1, learning_rates, {"lr": 1.0, "min_lr": 0.1, "lr_warmup_iters": 20, "lr_decay_style": style}
    )
    for step, rate in enumerate(rates):
        expected = step / 20 if step <= 20 else at((step - 20) / 80)
        assert rate == pytest.approx(expected), step


def test_wsd_stays_then_falls() -> None:
    (rates,) = run_on_ranks(
        1,
        learning_rates,
        {
            "lr": 1.0,
            "lr_warmup_iters": 10,
            "lr_decay_style": "WSD",
            "lr_wsd_decay_iters": 20,
            "lr_wsd_decay_style": "linear",
        },
    )
    assert rates[10:81] == [1.0] * 71
    assert rates[90] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0)
