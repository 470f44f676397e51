"""A rank that works slowly is named, though all ranks' steps take equally long; ranks that do other work are not."""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any

import pytest

from megatron_fp8.monitors.straggler import StragglerDetector, peers
from tests.checkpoint.training import checkpoint_config, train_on_this_rank
from tests.ranks import run_on_ranks

FACTOR = 3.0


@pytest.mark.parametrize("seed", range(50))
def test_the_slow_one_is_named_after_some_intervals_and_no_other(seed: int) -> None:
    draw = random.Random(seed)
    size, slow = draw.randint(2, 9), draw.randrange(2)
    watch = StragglerDetector(1.5, num_intervals=3)
    for interval in range(6):
        seconds = {rank: draw.uniform(1.0, 1.2) * (2.0 if rank == slow else 1.0) for rank in range(10, 10 + size)}
        seconds[10 + slow] = draw.uniform(2.0, 2.4)
        named = watch.add("compute", seconds)
        assert [each.rank for each in named] == ([10 + slow] if interval == 2 else [])
    assert watch.add("compute", dict.fromkeys(seconds, 1.0)) == []
    for interval in range(3):
        named = watch.add("compute", {**dict.fromkeys(seconds, 1.0), 10 + slow: 9.0})
        assert len(named) == (interval == 2)
    assert named[0].factor == 9.0


@pytest.mark.parametrize("seed", range(30))
def test_a_rank_is_compared_with_the_median_of_the_others(seed: int) -> None:
    draw = random.Random(seed)
    # Few values, so that some are equal.
    seconds = {rank: float(draw.randint(1, 6)) for rank in range(draw.randint(2, 12))}
    named = StragglerDetector(1.0, num_intervals=1).add("compute", seconds)
    expected = {
        rank: median([other for index, other in seconds.items() if index != rank]) for rank, own in seconds.items()
    }
    assert {each.rank: each.median_seconds for each in named} == {
        rank: usual for rank, usual in expected.items() if seconds[rank] >= usual
    }


def test_noise_names_nobody() -> None:
    draw = random.Random(0)
    watch = StragglerDetector(1.5, num_intervals=3)
    for _ in range(300):
        # One rank at a time is three times as slow, as by another program.
        seconds = {rank: draw.uniform(1.0, 1.3) for rank in range(8)}
        seconds[draw.randrange(8)] *= 3
        assert not [each for each in watch.add("compute", seconds) if each.factor < 1.5]


def test_waiting_for_data_counts_by_what_it_adds_to_the_step() -> None:
    """Ten times next to nothing is next to nothing."""
    watch = StragglerDetector(1.5, num_intervals=1)
    rest = {0: 1.0, 1: 1.0, 2: 1.0}
    assert watch.add("data", {0: 0.001, 1: 0.01, 2: 0.001}, rest) == []
    assert [each.rank for each in watch.add("data", {0: 0.001, 1: 0.7, 2: 0.001}, rest)] == [1]


def test_a_rank_without_peers_and_times_of_nothing_say_nothing() -> None:
    watch = StragglerDetector(1.5, num_intervals=1)
    assert watch.add("compute", {0: 5.0}) == []
    assert watch.add("compute", {0: 0.0, 1: 0.0}) == []


def test_peers_are_the_ranks_of_a_stage() -> None:
    assert [list(stage) for stage in peers(8, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def delay_on_the_last_rank(parts: Any) -> None:
    """A loop of 30 times what a module itself takes, in layers, or under TP in attention, which waits for nobody."""
    import torch
    from transformer_engine.pytorch import DotProductAttention, TransformerLayer

    if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
        return
    for chunk in parts.chunks:
        for module in chunk.modules():
            if isinstance(module, DotProductAttention if parts.groups.tp.size() > 1 else TransformerLayer):
                module.forward = slowed(module.forward)


def slowed(forward: Any) -> Any:
    def call(*arguments: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        result = forward(*arguments, **keywords)
        ends = time.perf_counter() + 30 * (time.perf_counter() - started)
        while time.perf_counter() < ends:
            pass
        return result

    return call


def records(config: Any, slow: bool) -> list[dict[str, Any]]:
    trained = train_on_this_rank(config, before=delay_on_the_last_rank if slow else None)
    return [record for record in trained.records if record["event"] == "slow-rank"]


@pytest.mark.parametrize(
    ("tp", "slow"),
    [
        (1, True),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_delayed_in_its_forward_pass_is_named(tp: int, slow: bool) -> None:
    config = checkpoint_config(
        precision={"mode": "bf16"},
        parallel={"tensor_model_parallel_size": tp},
        training={"train_iters": 10, "eval_iters": 0},
        checkpoint={"save": False},
        logging={"log_interval": 2},
        faults={"slow_rank_factor": FACTOR, "slow_rank_intervals": 3},
    )
    found, _ = run_on_ranks(2, records, config, slow)
    assert [record["rank"] for record in found] == ([1] if slow else [])
    if slow:
        (record,) = found
        # The first interval holds what both do once.
        assert record["iteration"] in (6, 8)
        assert record["work"] == "compute"
        assert record["factor"] > FACTOR
        assert record["host"]
