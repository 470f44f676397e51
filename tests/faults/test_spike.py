"""What is a spike and what is not: curves of many kinds without one, and spikes put into them."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.config.schema_run import FaultsConfig
from megatron_fp8.monitors.spike import RecentLosses, Spike, SpikeDetector
from tests.faults.training import TextSamples, faulty_config, train_on_this_rank
from tests.ranks import run_on_ranks

DEFAULTS = FaultsConfig()


def spikes(losses: Iterable[float], faults: FaultsConfig = DEFAULTS) -> list[Spike]:
    """What is found in losses of the steps from 1 on."""
    detector, recent = SpikeDetector(faults), RecentLosses()
    found = (detector.observe(recent, step, float(loss)) for step, loss in enumerate(losses, start=1))
    return [spike for spike in found if spike is not None]


def curve(
    seed: int, num_steps: int = 1500, noise: str = "normal", scale: float = 0.03, floor: float = 2.0
) -> np.ndarray:
    """A loss that falls from about 10 to 2 with noise of `scale` nats, as training losses do."""
    generator = np.random.default_rng(seed)
    steps = np.arange(1, num_steps + 1)
    fall = 2.0 + 8.0 * (steps / 20 + 1) ** -generator.uniform(0.6, 1.4)
    if noise == "normal":
        return fall + scale * generator.standard_normal(num_steps)
    if noise == "heavy":
        return fall + scale * generator.standard_t(5, num_steps)
    if noise == "growing":
        return fall + scale * (1 + steps / num_steps) * generator.standard_normal(num_steps)
    # Neighbouring steps have much in common: a loss that wanders.
    wander = np.zeros(num_steps)
    for step, shock in enumerate(generator.standard_normal(num_steps)):
        wander[step] = (0.7 * wander[step - 1] if step else 0.0) + 0.7 * scale * shock
    return fall + wander


@pytest.mark.parametrize("noise", ["normal", "heavy", "growing", "wandering"])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0.002, 0.3), window=st.sampled_from([32, 128]))
def test_a_falling_noisy_loss_has_no_spike(noise: str, seed: int, scale: float, window: int) -> None:
    assert spikes(curve(seed, noise=noise, scale=scale), FaultsConfig(spike_window=window)) == []


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    start=st.integers(400, 500),
    height=st.floats(1.5, 5.0),
    length=st.integers(5, 200),
)
def test_a_rise_that_lasts_is_found_where_it_began(seed: int, start: int, height: float, length: int) -> None:
    losses = curve(seed)
    losses[start - 1 : start - 1 + length] += height
    found = spikes(losses)
    assert [spike.began for spike in found] == [start]
    assert found[0].iteration - start < DEFAULTS.spike_num_steps
    assert found[0].loss > found[0].limit > found[0].median


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0.0, 0.15), height=st.floats(0.2, 0.6))
def test_single_steps_are_no_spike_and_hide_none(seed: int, share: float, height: float) -> None:
    """Up to a seventh of the steps stand out by up to 20 deviations: a mean and a deviation would be led astray."""
    generator = np.random.default_rng(seed)
    losses = curve(seed)
    # Never as many in a row as make a spike.
    outliers = (generator.random(losses.size) < share) & (np.arange(losses.size) % DEFAULTS.spike_num_steps != 0)
    losses[outliers] += height
    assert spikes(losses) == []
    losses[600:620] += 3.0
    assert [spike.began - 601 in range(-4, 1) for spike in spikes(losses)] == [True]


def test_a_single_loss_far_above_is_enough() -> None:
    losses = curve(0)
    losses[600] = 9.0
    (spike,) = spikes(losses)
    assert (spike.began, spike.iteration) == (601, 601)
    assert "lm loss 9.0000 at iteration 601 is above" in str(spike)


def test_one_spike_is_told_once_and_a_new_level_becomes_normal() -> None:
    losses = np.concatenate([curve(1)[:500], curve(2)[500:] + 2.0])
    assert [spike.began for spike in spikes(losses)] == [501]


def test_nothing_is_told_before_enough_is_known() -> None:
    losses = [2.0] * (DEFAULTS.spike_window - 1) + [50.0] + [2.0] * 500 + [50.0]
    assert [spike.began for spike in spikes(losses)] == [len(losses)]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(1, 600), start=st.integers(100, 500))
def test_a_resume_decides_as_the_run_would_have(seed: int, cut: int, start: int) -> None:
    """Also in the middle of a spike: what a decision depends on goes through a checkpoint's JSON unchanged."""
    losses = curve(seed, 600)
    losses[start : start + 50] += 1.0
    faults = FaultsConfig(spike_window=64)
    detector, recent = SpikeDetector(faults), RecentLosses()
    found = []
    for step, loss in enumerate(losses, start=1):
        if step == cut:
            recent = RecentLosses.from_lists(json.loads(json.dumps(recent.as_lists())))
        found.append(detector.observe(recent, step, float(loss)))
    assert [spike for spike in found if spike is not None] == spikes(losses, faults)


@pytest.mark.slow
def test_a_real_run_has_no_spike_and_one_put_into_it_is_found() -> None:
    """A small model on real text, every step's loss; with windows that fit into the run."""
    config = faulty_config(
        training={"train_iters": 240, "global_batch_size": 8, "micro_batch_size": 8},
        optimizer={"lr": 5e-3, "lr_decay_iters": 240, "lr_warmup_iters": 10},
        model={"num_layers": 2, "seq_length": 32},
        logging={"log_interval": 1},
        faults={"spike_window": 16},
    )
    run = run_on_ranks(1, train_on_this_rank, config, None, None, range(0), False, None, TextSamples(32))[0]
    assert run.events("spike") == []
    losses = [record["lm loss"] for record in run.events("train")]
    assert losses[0] > 5.0 > 3.5 > losses[-1]
    for window in (16, 32, 64):
        faults = FaultsConfig(spike_window=window)
        assert all(spikes(losses[begin:], faults) == [] for begin in range(0, 100, 10))
        for begin in (150, 200):
            spoilt = [*losses[:begin], *losses[:8], *losses[begin + 8 :]]
            assert [spike.began for spike in spikes(spoilt, faults)] == [begin + 1]
