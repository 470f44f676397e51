"""Planned messages against those that ranks of real runs ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.communication import step_traffic
from megatron_fp8.precision.chart_rows import Collective, Group
from tests.precision.observed import observed_collectives
from tests.ranks import run_on_ranks
from tests.small_run import VOCAB_SIZE, batches, run_small, small_config

SIZES = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2, "seq_length": 128}
GPT = SIZES | {
    "num_query_groups": None,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
}
FP8 = {"mode": "fp8", "fp8_amax_history_len": 4}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP = TP2 | {"sequence_parallel": True}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "TP and DP, bf16": (4, SIZES, {"mode": "bf16"}, TP2),
    "TP and DP, sequence parallel, fp8": (4, SIZES, FP8 | {"first_last_layers_bf16": True}, SP),
    "TP and PP, tied, fp8, recomputed": (4, GPT | {"recompute_granularity": "full"}, FP8, SP | PP2),
    "PP interleaved, replicated over DP": (
        4,
        SIZES,
        {"mode": "bf16"},
        PP2 | {"virtual_pipeline_model_parallel_size": 2, "use_distributed_optimizer": False},
    ),
    "FP8 weights over DP": (2, SIZES, FP8 | {"fp8_param_gather": True}, {}),
}


def config_of(model: dict[str, Any], precision: dict[str, Any], parallel: dict[str, Any]) -> Config:
    return small_config(
        model=model,
        precision=precision,
        parallel=parallel,
        training={"micro_batch_size": 2, "global_batch_size": 8},
    )


def count_messages(parts: Any) -> Counter:
    def step() -> None:
        parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)

    groups = {"tp": parts.groups.tp, "pp": parts.groups.pp, "dp": parts.groups.dp}
    seen = observed_collectives(step, groups) if len(parts.chunks) == 1 else interleaved_messages(step, groups)
    # Megatron calls some collectives in groups of one rank too, where nothing is sent.
    alone = {name for name, group in groups.items() if group.size() == 1}
    return Counter({key: size for key, size in seen.items() if key[0] not in alone})


def interleaved_messages(step: Callable[[], Any], groups: dict[str, Any]) -> Counter:
    """The interleaved schedule sends without batches."""
    import torch.distributed as dist

    sent: Counter = Counter()
    send = dist.isend

    def seen(tensor: Any, *arguments: Any, **named: Any) -> Any:
        sent["pp", "send", "whatever"] += tensor.numel() * tensor.element_size()
        return send(tensor, *arguments, **named)

    with patch.object(dist, "isend", seen):
        return observed_collectives(step, groups) + sent


def observe(config: Config) -> tuple[int, Counter]:
    record = run_small(config, 1, count_messages)
    return record.coordinates["pp"], record.probe


COLLECTIVES = {
    Collective.ALL_REDUCE: "all-reduce",
    Collective.ALL_REDUCE_MAX: "all-reduce",
    Collective.REDUCE_SCATTER: "reduce-scatter",
    Collective.ALL_GATHER: "all-gather",
    Collective.SEND: "send",
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_send_what_was_planned(case: str) -> None:
    world_size, *sections = CASES[case]
    config = config_of(*sections)
    layout = derive_layout(config, world_size, VOCAB_SIZE)
    for stage, observed in run_on_ranks(world_size, observe, config):
        planned: Counter = Counter()
        for item in step_traffic(config, layout, stage):
            # The groups of amaxes and of the tied embedding have no name here; with TP 1 the former is that of DP.
            group = {Group.TP: "tp", Group.PP: "pp", Group.DP: "dp"}.get(item.row.group, "other")
            if item.row.group is Group.TP_AND_DP and layout.tensor_model_parallel_size == 1:
                group = "dp"
            planned[group, COLLECTIVES[item.row.collective]] += item.row.size
        found: Counter = Counter()
        for (group, name, _), size in observed.items():
            found[group, name] += size
        assert found.keys() == planned.keys()
        for key, size in planned.items():
            # Buffers of gradients and parameters are padded.
            assert found[key] == pytest.approx(size, rel=0.02), key


def test_a_ring_sends_less_than_the_tensor() -> None:
    config = config_of(SIZES, {"mode": "bf16"}, {"use_distributed_optimizer": False})
    (gradients,) = step_traffic(config, derive_layout(config, 4, VOCAB_SIZE), 0)
    assert gradients.num_ranks == 4
    assert gradients.sent_bytes == pytest.approx(2 * 3 / 4 * gradients.row.size)
