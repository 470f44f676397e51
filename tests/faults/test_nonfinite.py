"""NaN or infinity on one rank: no policy lets it into the weights, on any rank, and who had it is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.faults.training import BATCH, STEPS, Fault, Outcome, faulty_config, train_on_this_rank
from tests.ranks import run_on_ranks

Sections = dict[str, dict[str, Any]]
BAD = 3
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
FP8 = {"mode": "fp8", "fp8_amax_history_len": 4}
LAST = "layers.0.layernorm_mlp.fc2_weight"
# Every precision and layout beside others; the rank with the fault is never the only one that has the parameter.
LOW = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16", "main_params_dtype": "fp16"}
CASES: dict[str, tuple[int, Sections, Fault]] = {
    "fp32, dp2 replicated": (
        2,
        {"precision": {"mode": "fp32"}, "parallel": {"use_distributed_optimizer": False}},
        Fault(1, (BAD,)),
    ),
    "bf16, dp2": (2, {"precision": {"mode": "bf16"}}, Fault(0, (BAD,))),
    "bf16, dp2 replicated": (
        2,
        {"precision": {"mode": "bf16"}, "parallel": {"use_distributed_optimizer": False}},
        Fault(1, (BAD,), parameter=LAST),
    ),
    "bf16, dp2, parameters gathered late": (
        2,
        {"precision": {"mode": "bf16"}, "parallel": {"overlap_param_gather": True, "overlap_grad_reduce": True}},
        Fault(1, (BAD,), "loss"),
    ),
    "delayed, tp2": (2, {"precision": FP8, "parallel": TP2}, Fault(1, (BAD,))),
    "delayed, pp2": (2, {"precision": FP8, "parallel": PP2}, Fault(0, (BAD,), parameter=LAST)),
    "loss, delayed, pp2": (2, {"precision": FP8, "parallel": PP2}, Fault(1, (BAD,), "loss")),
    "fp8 weights, dp2": (2, {"precision": {**FP8, "fp8_param_gather": True}}, Fault(1, (BAD,))),
    "tensorwise, tp2 dp2": (
        4,
        {"precision": {"mode": "fp8", "fp8_recipe": "tensorwise"}, "parallel": TP2},
        Fault(2, (BAD,)),
    ),
    "bf16, tp2 pp2": (4, {"precision": {"mode": "bf16"}, "parallel": {**TP2, **PP2}}, Fault(3, (BAD,))),
    "low moments, dp2": (2, {"precision": {"mode": "bf16", **LOW}}, Fault(1, (BAD,))),
    "loss, fp16": (
        2,
        {"precision": {"mode": "fp16", "initial_loss_scale": 256.0, "loss_scale_window": 1000}},
        Fault(1, (BAD,), "loss"),
    ),
}
QUICK = {"fp32, dp2 replicated", "delayed, tp2"}
SKIP = {"nonfinite": "skip", "spike": "off"}


def require_left_out(world_size: int, sections: Sections, fault: Fault) -> list[Outcome]:
    """A run that skips the bad step ends as one whose data never had that batch and whose length is one step less."""
    model = {"model": {"num_layers": 2}}
    whole = faulty_config(faults=SKIP, **{**model, **sections})
    shorter = faulty_config(training={"train_iters": STEPS - 1}, **{**model, **sections})
    skipping = run_on_ranks(world_size, train_on_this_rank, whole, None, fault)
    hole = range((BAD - 1) * BATCH, BAD * BATCH)
    without = run_on_ranks(world_size, train_on_this_rank, shorter, None, None, hole)
    for one, other in zip(skipping, without, strict=True):
        assert one.error == other.error == ""
        assert [name for name in other.state if comparable(one.state[name]) != comparable(other.state[name])] == []
        assert one.state.keys() == other.state.keys()
    return skipping


def comparable(value: str) -> str:
    """A state without what FP16 counts: steps whose gradients did not overflow, even where the loss was bad."""
    return re.sub(r"'growth_tracker': \d+", "", value)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_a_skipped_step_leaves_no_trace(case: str) -> None:
    world_size, sections, fault = CASES[case]
    (skip,) = require_left_out(world_size, sections, fault)[0].events("skip")
    assert skip["iteration"] == BAD
    assert skip["skips"] == skip["skips in a row"] == 1
    assert f"samples {(BAD - 1) * BATCH} to {BAD * BATCH - 1}" in skip["reason"]
    assert f"rank {fault.rank} (" in skip["reason"]
    if fault.where == "loss":
        assert "the loss of its samples" in skip["reason"]
    else:
        # By the whole model's name: with two stages of a layer each, the second one's is layer 1.
        layer = 1 if "pp 1" in skip["reason"] else 0
        assert fault.parameter.replace("layers.0", f"layers.{layer}") in skip["reason"]


def test_the_counts_of_a_run_that_skips(tmp_path: Path) -> None:
    """Skipped steps count as iterations and their samples as consumed, over a resume too; then it is too many."""
    config = faulty_config(
        faults={**SKIP, "nonfinite_max_skips_in_a_row": 2, "nonfinite_max_skips": 3},
        logging={"log_interval": 1},
        checkpoint={"async_save": False},
    )
    first = run_on_ranks(1, train_on_this_rank, config, tmp_path, Fault(0, (2, 4)), range(0), False, 5)[0]
    assert first.error.startswith("GoneError")
    assert [record["skips in a row"] for record in first.events("skip")] == [1, 1]
    assert [record["skipped-iterations"] for record in first.events("train")] == [0, 1, 1, 2, 2]
    # From the checkpoint of iteration 4, whose step was skipped: two more are one too many of the whole run.
    second = run_on_ranks(1, train_on_this_rank, config, tmp_path, Fault(0, (1, 3)), range(0), True)[0]
    assert [(record["iteration"], record["skips in a row"]) for record in second.events("skip")] == [(5, 2)]
    assert "faults.nonfinite_max_skips=3" in second.error
    assert "at iteration 7" in second.error


def test_too_many_in_a_row_end_the_run() -> None:
    config = faulty_config(faults={**SKIP, "nonfinite_max_skips_in_a_row": 2})
    outcome = run_on_ranks(1, train_on_this_rank, config, None, Fault(0, (2, 3, 4, 5)))[0]
    assert len(outcome.events("skip")) == 2
    assert "faults.nonfinite_max_skips_in_a_row=2" in outcome.error
    assert "at iteration 4" in outcome.error


@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_a_run_that_stops_has_whole_weights(where: str) -> None:
    """All ranks stop at the same step, and their weights are those of before it."""
    stopping = faulty_config(faults={"nonfinite": "stop"})
    stopped = run_on_ranks(2, train_on_this_rank, stopping, None, Fault(1, (BAD,), where))
    before = run_on_ranks(2, train_on_this_rank, stopping, None, None, range(0), False, BAD - 1)
    for one, other in zip(stopped, before, strict=True):
        assert one.error.startswith("NonFiniteError: lm loss is")
        assert f"at iteration {BAD} " in one.error
        assert "rank 1 (tp 0, pp 0, dp 1)" in one.error
        assert one.state == other.state
