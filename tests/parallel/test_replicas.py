"""What ranks hold twice stays equal, bit for bit, dropout or not; initial weights are the same in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.small_run import RunRecord, run_small, small_config

LAYOUTS = [(1, 1, None, 2), (2, 1, None, 2), (1, 2, None, 2), (1, 2, 2, 2), (4, 1, None, 4), (2, 2, None, 4)]


def config_of(tp: int, pp: int, vpp: int | None, tied: bool, **model: Any):
    return small_config(
        model={"untie_embeddings_and_output_weights": not tied, "add_bias_linear": True, **model},
        precision={"mode": "bf16"},
        parallel={
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
        },
    )


def parameters(parts) -> dict[str, torch.Tensor]:
    from megatron_fp8.model.build import global_parameters

    return {name: value.detach().float().clone() for name, value in global_parameters(parts.chunks)}


def run(config, num_steps: int) -> RunRecord:
    return run_small(config, num_steps, parameters)


def gathered(records: list[RunRecord], activation: str) -> dict[str, torch.Tensor]:
    """The whole model's parameters from the ranks' parts; ranks that hold the same must hold it bit for bit."""
    from megatron_fp8.model.sharding import parameter_sharding

    tp_size = max(record.coordinates["tp"] for record in records) + 1
    shards: dict[str, dict[int, torch.Tensor]] = {}
    for record in records:
        for name, value in record.probe.items():
            known = shards.setdefault(name, {}).setdefault(record.coordinates["tp"], value)
            assert torch.equal(known, value), f"{name} differs between ranks that hold the same part of it"
    whole = {}
    for name, by_rank in shards.items():
        sharding = parameter_sharding(name, activation)
        if sharding.axis is None:
            assert all(torch.equal(value, by_rank[0]) for value in by_rank.values()), name
            whole[name] = by_rank[0]
            continue
        parts = [by_rank[rank].chunk(sharding.num_parts, sharding.axis) for rank in range(tp_size)]
        whole[name] = torch.cat([part[i] for i in range(sharding.num_parts) for part in parts], sharding.axis)
    return whole


@pytest.mark.parametrize(("tp", "pp", "vpp", "world_size"), LAYOUTS)
def test_replicas_stay_equal_with_dropout(tp, pp, vpp, world_size) -> None:
    config = config_of(tp, pp, vpp, tied=True, hidden_dropout=0.1, attention_dropout=0.1)
    gathered(run_on_ranks(world_size, run, config, 3), config.model.activation)


def test_dropout_changes_the_loss() -> None:
    """Otherwise the test above shows nothing."""
    (with_dropout,) = run_on_ranks(1, run, config_of(1, 1, None, True, hidden_dropout=0.1), 1)
    (without,) = run_on_ranks(1, run, config_of(1, 1, None, True), 1)
    assert with_dropout.steps[0].loss != without.steps[0].loss


@pytest.fixture(scope="module")
def one_rank() -> dict[str, torch.Tensor]:
    (record,) = run_on_ranks(1, run, config_of(1, 1, None, tied=False), 0)
    return record.probe


@pytest.mark.parametrize(("tp", "pp", "vpp", "world_size"), LAYOUTS)
def test_initial_weights_do_not_depend_on_the_layout(tp, pp, vpp, world_size, one_rank) -> None:
    config = config_of(tp, pp, vpp, tied=False)
    whole = gathered(run_on_ranks(world_size, run, config, 0), config.model.activation)
    assert whole.keys() == one_rank.keys()
    for name, value in one_rank.items():
        # The vocabulary's padding grows with the tensor-parallel size, and is 0.
        assert torch.equal(whole[name][: len(value)], value), name
        assert not whole[name][len(value) :].any(), name


def test_initial_weights_have_their_distribution(one_rank) -> None:
    one_rank = {name: value.cpu() for name, value in one_rank.items()}
    small = one_rank["layers.1.layernorm_mlp.fc2_weight"].std()
    assert one_rank["layers.1.layernorm_mlp.fc1_weight"].std() == pytest.approx(0.02, rel=0.05)
    assert small == pytest.approx(0.02 / (2 * 4) ** 0.5, rel=0.05)
    assert not torch.equal(
        one_rank["layers.0.self_attention.proj.weight"], one_rank["layers.1.self_attention.proj.weight"]
    )
    assert bool((one_rank["final_norm.weight"] == 1).all())
    assert not one_rank["layers.0.layernorm_mlp.fc1_bias"].any()
    assert not one_rank["output_layer.weight"][250:].any()


def count(parts) -> int:
    return sum(value.numel() for value in parameters(parts).values())


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"untie_embeddings_and_output_weights": False, "position_embedding_type": "learned_absolute"},
        {"normalization": "LayerNorm", "activation": "gelu", "add_bias_linear": True, "ffn_hidden_size": None},
        {"kv_channels": 16, "num_query_groups": 8, "fuse_qkv_params": False},
    ],
)
def test_the_layout_counts_parameters_exactly(model: dict[str, Any]) -> None:
    from megatron_fp8.config.layout import derive_layout

    config = small_config(model=model)
    (record,) = run_on_ranks(1, run_small, config, 1, count)
    assert record.probe == derive_layout(config, 1, 250).num_parameters
