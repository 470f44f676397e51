"""The learning rate that is told before a run goes on is that of Megatron's schedule, and does not jump unasked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fp8.config.load import dump_config
from megatron_fp8.config.resume_check import compare_with_saved
from megatron_fp8.config.rules_optimizer import learning_rate
from megatron_fp8.config.run_start import Position
from megatron_fp8.config.schema import Config
from tests.small_run import small_config

WSD: dict[str, Any] = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 10}
STYLES: list[dict[str, Any]] = [
    {"lr_decay_style": "cosine"},
    {"lr_decay_style": "linear", "min_lr": 0.0},
    {"lr_decay_style": "constant"},
    *({**WSD, "lr_wsd_decay_style": style} for style in ("exponential", "linear", "cosine", "minus_sqrt")),
]


def config_of(iters: int = 40, batch: int = 16, override: bool = False, **optimizer: Any) -> Config:
    return small_config(
        training={"train_iters": iters, "global_batch_size": batch},
        optimizer={"lr": 1e-3, "min_lr": 1e-4, "lr_warmup_iters": 5, "lr_warmup_init": 1e-6, **optimizer},
        checkpoint={"override_opt_param_scheduler": override},
    )


@pytest.mark.parametrize("optimizer", [*STYLES, {"lr_decay_iters": 30}, {"lr_warmup_iters": 0}])
def test_it_is_the_rate_of_megatrons_schedule(optimizer: dict[str, Any]) -> None:
    from megatron_fp8.optim.optimizer import build_schedule

    config = config_of(**optimizer)
    group: dict[str, Any] = {}
    schedule = build_schedule(config, SimpleNamespace(param_groups=[group]))  # type: ignore[arg-type]
    for step in range(45):
        assert learning_rate(config, step) == pytest.approx(group["lr"], rel=1e-12)
        schedule.step(1)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("at", [0, 3, 20, 35])
def test_another_length_is_another_schedule_unless_the_rate_knew_nothing_of_it(style: dict[str, Any], at: int) -> None:
    saved = dump_config(config_of(**style))
    problems, notes = compare_with_saved(config_of(80, **style), saved, position=Position(at, 16 * at))
    allowed = at == 0 or style["lr_decay_style"] == "constant" or (style["lr_decay_style"] == "WSD" and at <= 30)
    assert [problem.key for problem in problems] == ([] if allowed else ["training.train_iters"])
    assert notes == ["training.train_iters is 80, was 40"]
    fixed = config_of(80, lr_decay_iters=40, **style)
    assert compare_with_saved(fixed, saved, position=Position(at))[0] == []


def test_the_old_and_the_new_rate_are_said() -> None:
    saved = dump_config(config_of())
    (problem,), _ = compare_with_saved(config_of(80), saved, position=Position(20, 320))
    assert problem.reason == (
        "optimizer.lr_decay_iters is null, so the learning-rate decay would end at step 80, but at step 40 in the "
        "checkpoint's schedule; at step 20 the learning rate would jump from 0.0006501 to 0.0009141"
    )
    problems, notes = compare_with_saved(config_of(80, override=True), saved, position=Position(20, 320))
    assert problems == []
    assert notes == [
        "training.train_iters is 80, was 40",
        "the learning-rate decay ends at step 80, was 40",
        "the learning rate at step 20 is 0.0009141, was 0.0006501",
    ]


def test_other_keys_of_the_schedule_say_their_rates_too() -> None:
    saved = dump_config(config_of())
    _, notes = compare_with_saved(config_of(lr=2e-3, override=True), saved, position=Position(20))
    assert "the learning rate at step 20 is 0.001261, was 0.0006501" in notes


def test_another_batch_is_blamed_where_the_length_is_in_samples() -> None:
    saved_config, config = config_of(40), config_of(60, batch=8)
    for each in (saved_config, config):
        object.__setattr__(each, "training", each.training.model_copy(update={"train_samples": 640}))
    (problem,), notes = compare_with_saved(config, dump_config(saved_config), position=Position(20, 320))
    assert (problem.key, problem.value) == ("training.global_batch_size", 8)
    assert any(note.startswith("training.global_batch_size is 8, was 16") for note in notes)


def test_weights_alone_bring_no_schedule() -> None:
    saved = dump_config(config_of())
    assert compare_with_saved(config_of(80, lr=2e-3), saved, weights_only=True, position=Position(20)) == ([], [])
