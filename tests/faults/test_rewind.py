"""Going back to a checkpoint inside the process ends in the bits of a run whose data never had what was passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.checkpoint.manifest import find_corruption
from tests.checkpoint.test_exact import DROPOUT
from tests.faults.test_nonfinite import FP8, PP2, TP2
from tests.faults.training import BATCH, Fault, LearnableSamples, faulty_config, train_on_this_rank
from tests.ranks import run_on_ranks

Sections = dict[str, dict[str, Any]]
REWIND = {"nonfinite": "rewind", "spike": "off"}
# At step 6 something is not finite: the weights of step 4 are the last with which a step went well.
BAD, GOOD = 6, 4
HOLE = range(GOOD * BATCH, BAD * BATCH)
CASES: dict[str, tuple[int, Sections]] = {
    "fp32, one rank": (1, {"precision": {"mode": "fp32"}}),
    "delayed, tp2": (2, {"precision": FP8, "parallel": TP2}),
    "delayed, pp2": (2, {"precision": FP8, "parallel": PP2}),
    "bf16, dp2": (2, {"precision": {"mode": "bf16"}}),
    "fp16, dp2 replicated": (
        2,
        {
            "precision": {"mode": "fp16", "initial_loss_scale": 2.0**14, "hysteresis": 1, "loss_scale_window": 2},
            "parallel": {"use_distributed_optimizer": False},
        },
    ),
    "fp8 weights, dp2": (2, {"precision": {**FP8, "fp8_param_gather": True}}),
    "tensorwise, tp2 pp2": (
        4,
        {"precision": {"mode": "fp8", "fp8_recipe": "tensorwise"}, "parallel": {**TP2, **PP2}},
    ),
}
QUICK = {"delayed, tp2"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_the_end_is_that_of_a_run_without_the_samples(case: str, tmp_path: Path) -> None:
    """Also when the process is gone after going back, and a new one resumes."""
    world_size, sections = CASES[case]
    config = faulty_config(faults=REWIND, **{"model": {"num_layers": 2, **DROPOUT}, **sections})
    fault = Fault(world_size - 1, (BAD,), "loss")
    straight = run_on_ranks(world_size, train_on_this_rank, config, None, None, HOLE)
    back = run_on_ranks(world_size, train_on_this_rank, config, tmp_path / "back", fault)
    # One step after the way back.
    gone = run_on_ranks(world_size, train_on_this_rank, config, tmp_path / "gone", fault, range(0), False, BAD + 1)
    resumed = run_on_ranks(world_size, train_on_this_rank, config, tmp_path / "gone", None, range(0), True)
    for plain, one, first, second in zip(straight, back, gone, resumed, strict=True):
        assert first.error.startswith("GoneError")
        assert plain.error == one.error == second.error == ""
        assert one.reopened == first.reopened == [GOOD]
        for other in (one, second):
            assert [name for name in plain.state if other.state[name] != plain.state[name]] == []
    (record,) = back[0].events("rewind")
    assert (record["iteration"], record["from-iteration"]) == (GOOD, BAD)
    assert (record["first skipped sample"], record["last skipped sample"]) == (HOLE.start, HOLE.stop - 1)
    assert f"rank {world_size - 1} (" in record["reason"]
    # Checkpoints: what was saved of the way that is left is set aside, the rest is whole, and the count goes on.
    directory = CheckpointDirectory(tmp_path / "back")
    assert [list(find_corruption(directory.path(iteration))) for iteration in directory.iterations()] == [[]] * 4
    counters = directory.manifest(8).counters
    assert (counters["rewinds"], counters["skipped_samples"]) == (1, len(HOLE))
    assert counters["consumed_samples"] == 8 * BATCH + len(HOLE)


def test_a_checkpoint_of_the_bad_steps_is_not_taken(tmp_path: Path) -> None:
    """Each time something is wrong right behind the checkpoint that was taken, an older one is; then there is none."""
    config = faulty_config(faults={**REWIND, "max_rewinds": 5}, model={"num_layers": 1})
    fault = Fault(0, range(BAD, 100), "loss")
    outcome = run_on_ranks(1, train_on_this_rank, config, tmp_path, fault)[0]
    assert outcome.reopened == [4, 2]
    assert "No intact checkpoint of iteration 1 or earlier" in outcome.error
    # The samples before the last way back are passed over too: nothing is read twice but what trained the weights.
    assert [record["last skipped sample"] for record in outcome.events("rewind")] == [23, 27]
    directory = CheckpointDirectory(tmp_path)
    assert directory.iterations() == [2]
    assert directory.latest() == 2
    assert directory.manifest(2).counters["skipped_samples"] == 28 - 8


def test_it_is_done_so_often_and_no_more(tmp_path: Path) -> None:
    """Over processes too."""
    config = faulty_config(faults={**REWIND, "max_rewinds": 1}, model={"num_layers": 1})
    gone = run_on_ranks(1, train_on_this_rank, config, tmp_path, Fault(0, (BAD,), "loss"), range(0), False, BAD + 1)[0]
    assert gone.reopened == [GOOD]
    outcome = run_on_ranks(1, train_on_this_rank, config, tmp_path, Fault(0, (4,), "loss"), range(0), True)[0]
    assert outcome.reopened == []
    assert "The run has rolled back 1 times already, and faults.max_rewinds=1" in outcome.error


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_by(tmp_path: Path) -> None:
    config = faulty_config(faults=REWIND, model={"num_layers": 1})

    outcome = run_on_ranks(
        1, train_on_this_rank, config, tmp_path, Fault(0, (BAD,), "loss"), range(0), False, None, None, damage_newest
    )[0]
    assert outcome.error == ""
    assert outcome.reopened == [2]
    assert "iter_0000004" in outcome.events("rewind")[0]["notes"][0]
    assert "SHA-256 differs" in outcome.events("rewind")[0]["notes"][0]


def damage_newest(parts: Any) -> None:
    """A byte of the newest checkpoint changes when the run wants to go back."""
    finish_write = parts.checkpointer.finish_write

    def finished() -> Any:
        directory = finish_write()
        path = next(directory.path(4).glob("*.distcp"))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        return directory

    parts.checkpointer.finish_write = finished


def test_without_checkpoints_there_is_no_way_back() -> None:
    config = faulty_config(faults=REWIND, model={"num_layers": 1}, checkpoint={"save": False})
    outcome = run_on_ranks(1, train_on_this_rank, config, None, Fault(0, (BAD,)))[0]
    assert "checkpoint.save is false" in outcome.error
    assert outcome.error.startswith("RollbackError: lm loss is")


def test_poisoned_data_is_found_and_passed_over(tmp_path: Path) -> None:
    """A stretch of random tokens in data that is otherwise learnt: the loss jumps, and the run ends without it."""
    steps, poisoned = 24, range(18 * BATCH, 20 * BATCH)
    config = faulty_config(
        faults={"spike": "rewind", "spike_window": 8, "spike_num_steps": 2, "spike_large_threshold": 1e6},
        training={"train_iters": steps},
        optimizer={"lr": 1e-2, "lr_decay_iters": steps},
        model={"num_layers": 1},
        checkpoint={"save_interval": 4},
        logging={"log_interval": 1},
    )
    samples = LearnableSamples(config.model.seq_length, poisoned)
    run = run_on_ranks(1, train_on_this_rank, config, tmp_path, None, range(0), False, None, samples)[0]
    assert run.error == ""
    (spike,), (rewind,) = run.events("spike"), run.events("rewind")
    losses = [(record["iteration"], record["lm loss"]) for record in run.events("train")]
    assert spike["began"] == 19, losses
    # The checkpoint of iteration 16 is the newest one with whose weights a step went well.
    assert run.reopened == [rewind["iteration"]] == [16]
    assert rewind["first skipped sample"] == 16 * BATCH
    hole = range(16 * BATCH, poisoned.stop)
    assert rewind["last skipped sample"] == hole.stop - 1
    straight = run_on_ranks(1, train_on_this_rank, config, None, None, hole, False, None, samples)[0]
    assert straight.state == run.state
    # A resume decides as this process would have: the losses that say what is normal are in the checkpoint.
    manifest = json.loads((tmp_path / "iter_0000016" / "manifest.json").read_text())
    assert len(manifest["lists"]["recent_losses"]) == 8
