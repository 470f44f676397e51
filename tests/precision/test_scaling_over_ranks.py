"""FP8 scaling state over ranks and layouts: one amax group, one scale."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.small_run import RunRecord, run_small, small_config

State = dict[str, tuple[list[float], list[list[float]]]]
# (tp, pp, vpp, world size): every kind of neighbour, alone and together.
LAYOUTS = [(1, 1, None, 2), (2, 1, None, 2), (1, 2, None, 2), (2, 1, None, 4), (2, 2, None, 4), (1, 2, 2, 2)]


def fp8_config(tp: int = 1, pp: int = 1, vpp: int | None = None, amax_reduction: str = "auto"):
    return small_config(
        precision={"mode": "fp8", "fp8_amax_history_len": 4, "amax_reduction": amax_reduction},
        parallel={
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
            "sequence_parallel": tp > 1,
        },
        training={"global_batch_size": 8},
    )


def scaling_by_global_name(parts) -> State:
    """Scales and histories of this rank, exactly, by global layer number."""
    from megatron_fp8.model.build import global_name
    from megatron_fp8.precision.delayed_scaling import scaling_states

    return {
        global_name(state.name, chunk.module.spec.first_layer): (state.scale.tolist(), state.amax_history.tolist())
        for chunk in parts.chunks
        for state in scaling_states(chunk.module)
    }


def run(config, num_steps: int) -> RunRecord:
    return run_small(config, num_steps, scaling_by_global_name)


def assert_one_state_per_stage(records: list[RunRecord]) -> None:
    for stage in {record.coordinates["pp"] for record in records}:
        states = [record.probe for record in records if record.coordinates["pp"] == stage]
        assert states[0]
        assert all(state == states[0] for state in states)


@pytest.fixture(scope="module")
def one_rank() -> State:
    (record,) = run_on_ranks(1, run, fp8_config(), 1)
    return record.probe


@pytest.mark.parametrize(("tp", "pp", "vpp", "world_size"), LAYOUTS)
def test_state_is_one_in_the_group_and_that_of_one_rank(tp, pp, vpp, world_size, one_rank: State) -> None:
    records = run_on_ranks(world_size, run, fp8_config(tp, pp, vpp), 1)
    assert_one_state_per_stage(records)
    merged: State = {}
    for record in records:
        merged.update(record.probe)
    assert merged.keys() == one_rank.keys()
    # The first GEMM's operands, input and weight, do not depend on the layout at all.
    first = "layers.0.self_attention.layernorm_qkv.scaling_fwd"
    for operand in (0, 1):
        assert merged[first][0][operand] == one_rank[first][0][operand]
    # Elsewhere activations differ by roundings of BF16 sums, gradients by the E5M2 steps these turn over.
    for name, (scale, _) in one_rank.items():
        tolerance = 0.02 if name.endswith("fwd") else 0.13
        assert merged[name][0] == pytest.approx(scale, rel=tolerance), name


def test_state_stays_one_over_steps() -> None:
    assert_one_state_per_stage(run_on_ranks(4, run, fp8_config(tp=2), 3))


def test_data_parallel_group_alone_fails_with_tensor_parallelism() -> None:
    config = fp8_config(tp=2)
    narrow = config.model_copy(
        update={"precision": config.precision.model_copy(update={"amax_reduction": "data_parallel"})}
    )
    records = run_on_ranks(2, run, narrow, 2)
    with pytest.raises(AssertionError):
        assert_one_state_per_stage(records)


def amaxes_on_four_ranks() -> list[float]:
    """Rank r sees an amax of 2^r; the scale and the history it ends up with."""
    from megatron.core import parallel_state

    from megatron_fp8.parallel.groups import amax_group, build_groups
    from megatron_fp8.precision.delayed_scaling import scaling_states
    from megatron_fp8.precision.manager import PrecisionManager
    from megatron_fp8.precision.policy import build_policy

    config = fp8_config(tp=2)
    groups = build_groups(config.parallel)
    manager = PrecisionManager(build_policy(config.precision, 4), amax_group("auto", groups), torch.device("cuda"))
    linear = small_linear()
    manager.attach({0: linear})
    with manager.training_step(), manager.region(0):
        linear(torch.full((16, 16), 2.0**groups.rank, dtype=torch.bfloat16, device="cuda"))
    manager.finish_step(skipped=False)
    forward = next(scaling_states(linear))
    parallel_state.destroy_model_parallel()
    return [float(forward.scale[0]), float(forward.amax_history[-1, 0])]


def small_linear():
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    return te.Linear(16, 16, params_dtype=torch.bfloat16, device="cuda")


def test_the_largest_amax_of_all_ranks_counts() -> None:
    assert run_on_ranks(4, amaxes_on_four_ranks) == [[448 / 8, 8.0]] * 4


def micro_batches_of_one_step() -> list[float]:
    """Amaxes 3, 9, 2 in three micro-batches of one step: scales during the step, then history and scale."""
    from megatron_fp8.precision.delayed_scaling import scaling_states
    from megatron_fp8.precision.manager import PrecisionManager
    from megatron_fp8.precision.policy import build_policy

    manager = PrecisionManager(build_policy(fp8_config().precision, 4), None, torch.device("cuda"))
    linear = small_linear()
    manager.attach({0: linear})
    seen = []
    with manager.training_step():
        for amax in (3.0, 9.0, 2.0):
            with manager.region(0):
                output = linear(torch.full((16, 16), amax, dtype=torch.bfloat16, requires_grad=True, device="cuda"))
            output.sum().backward()
            seen.append(float(next(scaling_states(linear)).scale[0]))
    manager.finish_step(skipped=False)
    forward, backward = scaling_states(linear)
    assert float(backward.amax_history[-1, 0]) == 1.0
    return [*seen, float(forward.amax_history[-1, 0]), float(forward.scale[0])]


def test_the_largest_amax_of_all_micro_batches_counts() -> None:
    assert run_on_ranks(1, micro_batches_of_one_step) == [[1.0, 1.0, 1.0, 9.0, pytest.approx(448 / 9)]]


def weights_used_in_training() -> list[tuple[float, float]]:
    """Validation loss after each step, and the training loss of the next on the same tokens."""
    training = {"global_batch_size": 4}
    config = small_config(precision={"mode": "fp8"}, optimizer={"lr": 2e-2}, training=training)
    record = run_small(config, 4, evaluate=True)
    return [(a.validation_loss, b.loss) for a, b in zip(record.steps, record.steps[1:], strict=False)]


def test_fp8_weights_follow_the_optimizer() -> None:
    """A weight cache that is not refreshed trains on the initial weights, and the losses part."""
    (losses,) = run_on_ranks(1, weights_used_in_training)
    for validation, training in losses:
        assert training == pytest.approx(validation, abs=2e-3)
