"""Masked tokens, however many lie together: no loss where none counts, a note, and training goes on."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megatron_fp8.report.console import ConsoleSink, LiveLine, format_record
from megatron_fp8.report.html.tables import numbers
from megatron_fp8.report.record import METRICS, JsonLines, Recorder
from megatron_fp8.report.run_reader import read_run
from tests.checkpoint.training import Samples
from tests.faults.training import BATCH, STEPS, Outcome, faulty_config, train_on_this_rank
from tests.ranks import run_on_ranks

# Two whole steps, which are one log interval; then one micro-batch, or one of two data-parallel ranks; then one sample.
MASKED = frozenset({*range(8, 16), 18, 19, 21})
NOTE = "no loss for the iterations since the last record: all their tokens are masked"


@dataclass(frozen=True)
class MaskedSamples:
    """Random tokens, none of which counts in the samples `masked`."""

    seq_length: int
    masked: Collection[int] = MASKED

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = Samples(self.seq_length)[index]
        if index in self.masked:
            sample["loss_mask"].zero_()
        return sample


def masked_run(config: Any, masked: Collection[int] = MASKED) -> Outcome:
    return train_on_this_rank(config, samples=MaskedSamples(config.model.seq_length, masked))


def config_of(mode: str = "bf16", log_interval: int = 2, **parallel: Any) -> Any:
    return faulty_config(
        model={"num_layers": 2},
        precision={"mode": mode, **({"initial_loss_scale": 256.0} if mode == "fp16" else {})},
        parallel=parallel,
        logging={"log_interval": log_interval},
        faults={"spike": "warn"},
    )


def losses_of(outcome: Outcome) -> list[float | None]:
    return [record["lm loss"] for record in outcome.events("train")]


def require_one_gap(outcome: Outcome) -> None:
    """The second of four records has no loss, which a note says; all else is as in any run."""
    assert outcome.error == ""
    first, second, *others = outcome.events("train")
    assert second["iteration"] == 4
    assert second["lm loss"] is None
    assert second["grad-norm"] == 0.0
    assert second["skipped-iterations"] == 0
    assert second["consumed-samples"] == 16
    for record in (first, *others):
        assert 4 < record["lm loss"] < 7
        assert 0 < record["grad-norm"] < 100
    assert [(note["iteration"], note["of"]) for note in outcome.events("no-loss")] == [(4, "training")]
    assert outcome.events("spike") == outcome.events("skip") == []
    assert outcome.events("end")[0]["iteration"] == STEPS


@pytest.mark.parametrize("mode", ["bf16", "fp8", "fp16"])
def test_a_log_interval_without_tokens_has_no_loss_and_ends_nothing(mode: str) -> None:
    (outcome,) = run_on_ranks(1, masked_run, config_of(mode))
    require_one_gap(outcome)


def test_in_every_layout_the_losses_are_the_same() -> None:
    """With two data-parallel ranks one of them has no token in the fifth step, with one a micro-batch has none."""
    (alone,) = run_on_ranks(1, masked_run, config_of("fp32"))
    require_one_gap(alone)
    for parallel in ({}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}):
        outcomes = run_on_ranks(2, masked_run, config_of("fp32", **parallel))
        for outcome in outcomes:
            require_one_gap(outcome)
            assert losses_of(outcome)[0] == pytest.approx(losses_of(alone)[0], rel=1e-6)
            assert losses_of(outcome)[2:] == pytest.approx(losses_of(alone)[2:], rel=1e-4)


def test_the_log_interval_decides_nothing() -> None:
    """The mean is over tokens: steps without any have no part in it, wherever a record begins."""
    ends = {}
    for log_interval in (1, 3, 8):
        (outcome,) = run_on_ranks(1, masked_run, config_of("bf16", log_interval))
        assert outcome.error == ""
        ends[log_interval] = outcome
    each = losses_of(ends[1])
    assert [loss is None for loss in each] == [step in (3, 4) for step in range(1, STEPS + 1)]
    assert len(ends[1].events("no-loss")) == 2
    assert ends[3].events("no-loss") == ends[8].events("no-loss") == []
    tokens = [
        sum(int(MaskedSamples(16)[index]["loss_mask"].sum()) for index in range(step * BATCH, (step + 1) * BATCH))
        for step in range(STEPS)
    ]
    (whole,) = losses_of(ends[8])
    total = sum((loss or 0.0) * count for loss, count in zip(each, tokens, strict=True))
    assert whole == pytest.approx(total / sum(tokens), rel=1e-9)
    assert ends[1].state == ends[3].state == ends[8].state


def test_a_run_of_masked_tokens_alone_runs_to_its_end() -> None:
    (outcome,) = run_on_ranks(1, masked_run, config_of("fp8"), range(STEPS * BATCH))
    assert outcome.error == ""
    assert losses_of(outcome) == [None] * 4
    assert all(0 < record["tokens-per-second"] < math.inf for record in outcome.events("train"))


def evaluated(weights: tuple[float | None, ...], masked: tuple[bool, ...]) -> tuple[float | None, list[Any]]:
    """(the total, what was recorded) of validation sets, some of masked tokens alone, at the start of a run."""
    from megatron_fp8 import device as devices
    from megatron_fp8.data.validation import ValidationSet
    from megatron_fp8.train.evaluate import evaluate
    from megatron_fp8.train.setup import build_parts
    from megatron_fp8.train.state import TrainState
    from tests.checkpoint.training import derived_layout
    from tests.small_run import VOCAB_SIZE

    config = config_of()
    parts = build_parts(config, derived_layout(config), VOCAB_SIZE, devices.prepare(), Recorder([]))
    sets = [
        ValidationSet(name, MaskedSamples(16, range(BATCH) if every else ()), BATCH, weight)
        for name, every, weight in zip(("web", "code"), masked, weights, strict=True)
    ]
    total, events = evaluate(parts.stepper, parts.batches, sets, TrainState())
    again, later = evaluate(parts.stepper, parts.batches, sets, TrainState(iteration=2))
    assert again == total
    return total, [{"event": event, **values} for event, values in [*events, *later]]


@pytest.mark.parametrize("weights", [(None, None), (0.25, 0.75)])
def test_a_validation_set_without_tokens_has_no_loss_and_no_part_in_the_total(weights: tuple[Any, ...]) -> None:
    ((total, records),) = run_on_ranks(1, evaluated, weights, (False, True))
    note, record, again = records
    assert (note["event"], note["of"], note["sets"]) == ("no-loss", "validation", ["code"]), "once"
    assert record["lm loss validation/code"] is record["lm loss validation ppl/code"] is None
    assert total == record["lm loss validation"] == record["lm loss validation/web"] == again["lm loss validation"]
    assert 4 < total < 7
    assert "lm loss validation/code -" in format_record(record, 8)


@pytest.mark.parametrize("weights", [(None, None), (0.25, 0.75)])
def test_an_evaluation_without_tokens_has_no_loss(weights: tuple[Any, ...]) -> None:
    ((total, records),) = run_on_ranks(1, evaluated, weights, (True, True))
    assert total is None
    assert (records[0]["of"], records[0]["sets"]) == ("validation", ["web", "code"])
    assert records[1]["lm loss validation"] is records[1]["lm loss validation ppl"] is None
    assert format_record(records[1], 8).startswith("iteration 0/8 | lm loss validation - | ")


def test_every_view_takes_a_record_without_a_loss(tmp_path: Path) -> None:
    (outcome,) = run_on_ranks(1, masked_run, config_of())
    terminal = io.StringIO()
    live_line = LiveLine(Console(file=terminal, force_terminal=True, width=120), STEPS, 0)
    recorder = Recorder([JsonLines(tmp_path / METRICS), ConsoleSink(tmp_path / "console.log", STEPS, 0, False)])
    validation = {"iteration": 8, "lm loss validation": None, "lm loss validation ppl": None}
    for record in [*outcome.records, {"event": "validation", **validation}]:
        values = {name: value for name, value in record.items() if name not in ("event", "time")}
        recorder.write(record["event"], values)
        live_line.update(record)
    recorder.close()
    live_line.close()
    log = (tmp_path / "console.log").read_text()
    assert f"iteration 4 | {NOTE}\niteration 4/8 | lm loss - | grad-norm 0.000" in log
    assert "iteration 8/8 | lm loss validation -" in log
    assert {row.name: row.cells for row in numbers([read_run(tmp_path)])}["Last training loss, nats per token"]
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "4/8  loss -  " in drawn
    assert " val " not in drawn


def test_the_spike_detector_is_shown_no_step_without_a_loss() -> None:
    from megatron_fp8.monitors.nonfinite import StepJudge, Verdict
    from megatron_fp8.monitors.spike import RecentLosses
    from megatron_fp8.train.state import TrainState

    recent = RecentLosses([5.0, 5.0, 5.0], [2])
    groups: Any = None
    result: Any = SimpleNamespace(nonfinite=False, skipped=False, mean_loss=None)
    assert StepJudge(config_of(), groups, []).judge(recent, TrainState(3), result) == Verdict()
    assert recent == RecentLosses([5.0, 5.0, 5.0], [2])
