"""Every mode of the table: ten steps on one rank and on four, recomputation, evaluation, a NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.small_run import batches, run_small, small_config

MODES: dict[str, dict[str, Any]] = {
    "fp32": {"mode": "fp32"},
    "fp16": {"mode": "fp16", "initial_loss_scale": 2.0**11},
    "bf16": {"mode": "bf16"},
    "delayed": {"mode": "fp8", "fp8_amax_history_len": 4},
    "delayed e4m3": {"mode": "fp8", "fp8_format": "e4m3", "fp8_amax_compute_algo": "most_recent"},
    "tensorwise": {"mode": "fp8", "fp8_recipe": "tensorwise"},
    "blockwise": {"mode": "fp8", "fp8_recipe": "blockwise"},
    "mxfp8": {"mode": "fp8", "fp8_recipe": "mxfp8"},
    "delayed, primary": {"mode": "fp8", "fp8_amax_history_len": 4, "fp8_param_gather": True},
    "tensorwise, primary": {"mode": "fp8", "fp8_recipe": "tensorwise", "fp8_param_gather": True},
    "blockwise, primary": {"mode": "fp8", "fp8_recipe": "blockwise", "fp8_param_gather": True},
}
FOUR_RANKS = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}


def config_of(mode: str, parallel: dict | None = None, **model):
    """Wide enough for MXFP8's blocks of 32 on two tensor-parallel ranks; two micro-batches."""
    shape = {"hidden_size": 128, "ffn_hidden_size": 256, "seq_length": 64, "num_layers": 2, **model}
    training = {"micro_batch_size": 4, "global_batch_size": 8}
    return small_config(model=shape, precision=MODES[mode], parallel=parallel or {}, training=training)


def losses(config, num_steps: int) -> list[tuple[float, float]]:
    return [(step.loss, step.grad_norm) for step in run_small(config, num_steps).steps]


@pytest.fixture(scope="module")
def fp32_losses() -> list[float]:
    (alone,) = run_on_ranks(1, losses, config_of("fp32"), 10)
    return [loss for loss, _ in alone]


# Of weights that live in FP8, layouts are compared in test_primary_weights.py too.
SLOW = ("tensorwise, primary", "blockwise, primary")


@pytest.mark.parametrize("mode", [pytest.param(m, marks=pytest.mark.slow) if m in SLOW else m for m in MODES])
def test_ten_steps_on_one_rank_and_on_four(mode: str, fp32_losses: list[float]) -> None:
    (alone,) = run_on_ranks(1, losses, config_of(mode), 10)
    four = run_on_ranks(4, losses, config_of(mode, FOUR_RANKS), 10)
    assert all(rank == four[0] for rank in four)
    one_rank, four_ranks = ([loss for loss, _ in run] for run in (alone, four[0]))
    assert one_rank[-1] < one_rank[0] - 0.5
    # What a format costs, and what a layout changes in it.
    assert one_rank == pytest.approx(fp32_losses, abs=2e-2)
    assert four_ranks == pytest.approx(one_rank, abs=1e-5 if mode == "fp32" else 1e-2)


def outputs_gradients_and_state(config, evaluations: int) -> tuple[list, dict]:
    """Losses, norms, every gradient of the third step, weights and masters after it, and the scaling state."""

    def probe(parts):
        seen = []
        for _ in range(3):
            for _ in range(evaluations):
                parts.stepper.evaluate(batches(parts), parts.batches.shape)
            result = parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
            seen.append((result.loss.sum_and_tokens.tolist(), result.grad_norm))
        gradients = {name: p.main_grad.clone() for chunk in parts.chunks for name, p in chunk.named_parameters()}
        state = {f"state {name}": tensor for name, tensor in parts.precision.state_dict().items()}
        masters = [master for group in parts.optimizer.optimizer.param_groups for master in group["params"]]
        state |= {f"master {number}": master.detach().clone() for number, master in enumerate(masters)}
        return seen, {**gradients, **state}

    return run_small(config, 0, probe).probe


@pytest.mark.parametrize("mode", MODES)
def test_recomputation_and_evaluations_between_steps_change_no_bit(mode: str) -> None:
    recomputing = config_of(mode, recompute_granularity="full")
    (plain,) = run_on_ranks(1, outputs_gradients_and_state, config_of(mode), 0)
    for disturbed in (
        *run_on_ranks(1, outputs_gradients_and_state, recomputing, 0),
        *run_on_ranks(1, outputs_gradients_and_state, config_of(mode), 2),
    ):
        assert disturbed[0] == plain[0]
        assert disturbed[1].keys() == plain[1].keys()
        for name, tensor in plain[1].items():
            assert torch.equal(disturbed[1][name], tensor), name


def scales_around_a_nan(config) -> tuple[bool, list[bool]]:
    """A weight of one rank becomes NaN after a good step; whether the norm is NaN then, and the state is finite."""

    def probe(parts):
        parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
        before = parts.precision.state_dict()
        if parts.groups.rank == 0:
            parts.chunks[0].module.layers[0].layernorm_mlp.layer_norm_weight.data[0] = math.nan
        result = parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
        after = parts.precision.state_dict()
        unchanged = [
            torch.equal(after[name], tensor) if name.endswith("scale") else bool(tensor.isfinite().all())
            for name, tensor in before.items()
        ]
        return math.isnan(result.grad_norm), unchanged

    return run_small(config, 0, probe).probe


@pytest.mark.parametrize("mode", ["delayed", "delayed, primary"])
def test_a_step_with_nan_leaves_the_scales_of_all_ranks(mode: str) -> None:
    for is_nan, unchanged in run_on_ranks(2, scales_around_a_nan, config_of(mode)):
        assert is_nan
        assert unchanged
        assert all(unchanged)
