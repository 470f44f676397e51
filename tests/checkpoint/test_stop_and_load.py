"""When a run stops before its end, and what a run takes from somebody else's checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from tests.checkpoint.training import STEPS, STEPS_BEFORE, Trained, checkpoint_config, train_on_this_rank
from tests.ranks import run_on_ranks


def make_config(mode: str = "bf16", optimizer: dict[str, Any] | None = None, **checkpoint: Any):
    return checkpoint_config(
        model={"num_layers": 1},
        precision={"mode": mode},
        training={"eval_interval": STEPS_BEFORE},
        optimizer=optimizer or {},
        checkpoint={"save_interval": 0, **checkpoint},
        logging={"log_interval": 1},
    )


def end_of(rank: Trained) -> dict[str, Any]:
    (record,) = [record for record in rank.records if record["event"] == "end"]
    return record


def of_kind(rank: Trained, event: str) -> dict[int, dict[str, Any]]:
    return {record["iteration"]: record for record in rank.records if record["event"] == event}


def test_a_run_stops_and_saves_after_so_many_steps(tmp_path: Path) -> None:
    (rank,) = run_on_ranks(1, train_on_this_rank, make_config(exit_interval=4), tmp_path)
    assert (end_of(rank)["iteration"], end_of(rank)["stopped"]) == (4, "checkpoint.exit_interval=4")
    assert CheckpointDirectory(tmp_path).iterations() == [4]


def test_the_last_step_is_an_end_and_no_stop(tmp_path: Path) -> None:
    (rank,) = run_on_ranks(1, train_on_this_rank, make_config(exit_interval=STEPS), tmp_path)
    assert (end_of(rank)["iteration"], end_of(rank)["stopped"]) == (STEPS, None)
    assert CheckpointDirectory(tmp_path).iterations() == [STEPS]


def test_a_run_stops_and_saves_when_its_time_is_up(tmp_path: Path) -> None:
    (rank, _) = run_on_ranks(2, train_on_this_rank, make_config(exit_duration_in_mins=1e-9), tmp_path)
    assert (end_of(rank)["iteration"], end_of(rank)["stopped"]) == (1, "checkpoint.exit_duration_in_mins has passed")
    assert CheckpointDirectory(tmp_path).iterations() == [1]


def train_and_signal(config, directory: Path, number: int, receiver: int) -> tuple[Trained, bool]:
    """One rank gets the signal between the second and the third step; also, whether handlers are as before the run."""
    import torch

    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]

    def send_later(parts: Any) -> None:
        after_step = parts.checkpointer.after_step

        def send(progress: Any, stops: bool) -> None:
            if progress.state.iteration == 2 and torch.distributed.get_rank() == receiver:
                # From a scheduler that tells every process, and from the launcher that passes it on.
                os.kill(os.getpid(), number)
                os.kill(os.getpid(), number)
            after_step(progress, stops)

        parts.checkpointer.after_step = send

    trained = train_on_this_rank(config, directory, before=send_later)
    return trained, before == [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]


@pytest.mark.parametrize(("name", "receiver"), [("SIGTERM", 1), ("SIGUSR1", 0)])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(name: str, receiver: int, tmp_path: Path) -> None:
    ranks = run_on_ranks(2, train_and_signal, make_config(), tmp_path, getattr(signal, name), receiver)
    for rank, restored in ranks:
        assert restored
        assert (end_of(rank)["iteration"], end_of(rank)["stopped"]) == (3, f"signal {name}")
    assert CheckpointDirectory(tmp_path).iterations() == [3]


def test_a_fine_tuning_takes_the_weights_and_nothing_else(tmp_path: Path) -> None:
    config = make_config(save_interval=STEPS_BEFORE)
    (first,) = run_on_ranks(1, train_on_this_rank, config, tmp_path)
    saved = CheckpointDirectory(tmp_path).path(STEPS_BEFORE)
    (tuned,) = run_on_ranks(1, train_on_this_rank, config, None, saved, True)
    (fresh,) = run_on_ranks(1, train_on_this_rank, config)
    # The very weights, on the same samples.
    loss = "lm loss validation"
    assert of_kind(tuned, "validation")[0][loss] == of_kind(first, "validation")[STEPS_BEFORE][loss]
    assert of_kind(tuned, "validation")[0][loss] != of_kind(fresh, "validation")[0][loss]
    # Counters, schedule and data as in a new run.
    for name in ("learning-rate", "consumed-samples", "consumed-tokens"):
        assert [record[name] for record in of_kind(tuned, "train").values()] == [
            record[name] for record in of_kind(fresh, "train").values()
        ]
    assert sorted(tuned.samples) == sorted(fresh.samples)
    # Adam's bias correction depends on its step: that of the new run.
    steps = [name for name in fresh.state if name.endswith(".step")]
    assert steps
    assert all(tuned.state[name] == fresh.state[name] for name in steps)
    assert end_of(tuned)["iteration"] == STEPS


def test_a_schedule_that_is_replaced_is_that_of_the_new_config(tmp_path: Path) -> None:
    (first,) = run_on_ranks(1, train_on_this_rank, make_config(save_interval=STEPS_BEFORE), tmp_path)
    saved = CheckpointDirectory(tmp_path).path(STEPS_BEFORE)
    other = {"lr": 5e-4, "min_lr": 0.0, "lr_decay_style": "linear", "weight_decay": 0.3}
    config = make_config(optimizer=other, override_opt_param_scheduler=True)
    (replaced,) = run_on_ranks(1, train_on_this_rank, config, None, saved)
    (fresh,) = run_on_ranks(1, train_on_this_rank, config)
    rates = {iteration: record["learning-rate"] for iteration, record in of_kind(replaced, "train").items()}
    expected = {iteration: record["learning-rate"] for iteration, record in of_kind(fresh, "train").items()}
    assert rates == {iteration: expected[iteration] for iteration in range(STEPS_BEFORE + 1, STEPS + 1)}
    decays = [name for name in fresh.state if name.endswith(".weight_decay")]
    assert {replaced.state[name] for name in decays} == {fresh.state[name] for name in decays} != set()
    assert {first.state[name] for name in decays} != {fresh.state[name] for name in decays}


def test_a_run_that_loads_goes_on_with_the_same_numbers_in_a_directory_of_its_own(tmp_path: Path) -> None:
    config = make_config(save_interval=STEPS_BEFORE)
    (first,) = run_on_ranks(1, train_on_this_rank, config, tmp_path / "first")
    saved = CheckpointDirectory(tmp_path / "first").path(STEPS_BEFORE)
    (second,) = run_on_ranks(1, train_on_this_rank, config, tmp_path / "second", saved)
    assert second.series() == first.series(after=STEPS_BEFORE)
    # What it started from is not written again.
    assert CheckpointDirectory(tmp_path / "second").iterations() == [STEPS]
