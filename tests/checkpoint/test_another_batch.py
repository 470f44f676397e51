"""A run that goes on with batches of another size: the samples in their order, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from tests.checkpoint.training import STEPS, STEPS_BEFORE, Trained, checkpoint_config, train_on_this_rank
from tests.ranks import run_on_ranks

DATA_PARALLEL = 2
SAMPLES_BEFORE = 4 * STEPS_BEFORE


def config_with(**training: int) -> Any:
    return checkpoint_config(training={"micro_batch_size": 1, "eval_iters": 0, **training})


@pytest.mark.parametrize("batch", [2, 6])
def test_no_sample_is_read_twice_or_left_out(batch: int, tmp_path: Path) -> None:
    run_on_ranks(DATA_PARALLEL, train_on_this_rank, config_with(), tmp_path)
    steps_after = 4 * (STEPS - STEPS_BEFORE) // batch
    config = config_with(global_batch_size=batch, train_iters=STEPS_BEFORE + steps_after)
    saved = CheckpointDirectory(tmp_path).path(STEPS_BEFORE)
    ranks: list[Trained] = run_on_ranks(DATA_PARALLEL, train_on_this_rank, config, None, saved)
    assert sorted(index for rank in ranks for index in rank.samples) == list(range(SAMPLES_BEFORE, 4 * STEPS))
    (last,) = [record for record in ranks[0].records if record["event"] == "end"]
    newest = [record for record in ranks[0].records if record["event"] == "train"][-1]
    assert (last["iteration"], newest["consumed-samples"]) == (STEPS_BEFORE + steps_after, 4 * STEPS)
