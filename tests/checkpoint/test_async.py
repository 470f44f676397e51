"""Writing in the background: on the disk is the state of the step that saved, whatever the steps after it do."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.checkpoint.difference import differences
from megatron_fp8.checkpoint.directory import CheckpointDirectory
from tests.checkpoint.training import STEPS, STEPS_BEFORE, Trained, checkpoint_config, train_on_this_rank
from tests.ranks import RankError, run_on_ranks

PATIENCE_SECONDS = 60


def make_config(**checkpoint: Any):
    return checkpoint_config(
        model={"num_layers": 1},
        precision={"mode": "bf16"},
        training={"eval_iters": 0},
        checkpoint=checkpoint,
    )


def train_with_slow_writers(config, directory: Path) -> Trained:
    """The writers of the first checkpoint begin once two more steps were made."""
    from megatron_fp8.checkpoint import save

    write, trainer = save.write_part, os.getpid()
    stepped = directory / f"stepped.{trainer}"

    def wait_and_write(*arguments: Any, **keywords: Any) -> None:
        assert os.getpid() != trainer
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not stepped.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        write(*arguments, **keywords)

    def before(parts: Any) -> None:
        save.write_part = wait_and_write
        after_step = parts.checkpointer.after_step

        def tell_the_writer(progress: Any, stops: bool) -> None:
            if progress.state.iteration == STEPS_BEFORE + 2:
                # Nothing was committed yet, and training went on.
                assert CheckpointDirectory(directory).iterations() == []
                stepped.touch()
            after_step(progress, stops)

        parts.checkpointer.after_step = tell_the_writer

    return train_on_this_rank(config, directory, before=before)


def test_steps_that_are_made_while_it_is_written_leave_no_trace_in_it(tmp_path: Path) -> None:
    slow, held_up = tmp_path / "slow", tmp_path / "held up"
    for directory in (slow, held_up):
        directory.mkdir()
    background = run_on_ranks(2, train_with_slow_writers, make_config(), slow)
    waiting = run_on_ranks(2, train_on_this_rank, make_config(async_save=False), held_up)
    for iteration in (STEPS_BEFORE, STEPS):
        paths = [CheckpointDirectory(directory).path(iteration) for directory in (slow, held_up)]
        assert {difference.kind for difference in differences(*paths)} == {"equal"}
    assert [rank.state for rank in background] == [rank.state for rank in waiting]
    # Three steps change every weight, so that a writer that read later would have shown.
    path = CheckpointDirectory(slow).path
    changed = [d.kind for d in differences(path(STEPS_BEFORE), path(STEPS), "master.")]
    assert set(changed) == {"values"}
    times = [record for record in background[0].records if record["event"] == "checkpoint"]
    assert [record["iteration"] for record in times] == [STEPS_BEFORE, STEPS]
    assert times[0]["hold-up-seconds"] < times[0]["seconds"]


def train_without_checkpoints(config) -> Trained:
    return train_on_this_rank(config)


def test_saving_changes_nothing_of_the_training(tmp_path: Path) -> None:
    saving = run_on_ranks(2, train_on_this_rank, make_config(save_interval=1), tmp_path)
    plain = run_on_ranks(2, train_without_checkpoints, make_config())
    assert [rank.state for rank in saving] == [rank.state for rank in plain]
    assert [rank.series() for rank in saving] == [rank.series() for rank in plain]


def train_with_failing_writer(config, directory: Path, steps_seen: Path) -> Trained:
    import torch

    from megatron_fp8.checkpoint import save

    rank = torch.distributed.get_rank()

    def fail(*arguments: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device", "the second disk")

    def before(parts: Any) -> None:
        if rank == 1:
            save.write_part = fail
        after_step = parts.checkpointer.after_step

        def count(progress: Any, stops: bool) -> None:
            with (steps_seen / f"rank{rank}").open("a") as file:
                file.write(f"{progress.state.iteration}\n")
            after_step(progress, stops)

        parts.checkpointer.after_step = count

    return train_on_this_rank(config, directory, before=before)


def test_a_write_that_failed_ends_training_with_its_own_error(tmp_path: Path) -> None:
    """At a later step, on every rank, and not when the run would have ended."""
    directory, steps = tmp_path / "checkpoints", tmp_path
    config = make_config(save_interval=2).model_copy(
        update={"training": make_config().training.model_copy(update={"train_iters": 400})}
    )
    with pytest.raises(RankError, match=r"iteration 2 could not be written: rank 1: .*No space left on device"):
        run_on_ranks(2, train_with_failing_writer, config, directory, steps)
    last = int((steps / "rank0").read_text().splitlines()[-1])
    assert 2 < last <= 4
    assert CheckpointDirectory(directory).iterations() == []
    assert CheckpointDirectory(directory).latest() is None


def test_checkpoints_that_are_not_kept_go_once_the_next_is_whole(tmp_path: Path) -> None:
    config = make_config(save_interval=1, keep_last=2, save_retain_interval=3)
    (rank,) = run_on_ranks(1, train_on_this_rank, config, tmp_path)
    assert CheckpointDirectory(tmp_path).iterations() == [3, 5, 6]
    records = [record for record in rank.records if record["event"] == "checkpoint"]
    assert [record["iteration"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["removed"] for record in records] == [[], [], [1], [2], [], [4]]
    assert {path.name for path in tmp_path.iterdir()} == {
        "iter_0000003",
        "iter_0000005",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
    }
