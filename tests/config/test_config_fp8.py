"""FP8's shape rules against TE's own condition on every operand of every GEMM, written out here once more."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from config_samples import VOCAB_SIZE, load_small
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.config.check import all_findings, check_config
from megatron_fp8.config.facts import Facts
from megatron_fp8.config.schema import Config


def operands(config: Config) -> list[tuple[int, ...]]:
    """Shapes of all FP8 operands on one rank: activations local and gathered, weights, gradients."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    assert model.num_query_groups is not None
    assert model.kv_channels is not None
    assert model.ffn_hidden_size is not None
    s, b, h = model.seq_length, config.training.micro_batch_size, model.hidden_size
    heads, groups = model.num_attention_heads // tp, model.num_query_groups // tp
    local = s // tp if config.parallel.sequence_parallel else s
    qkv, attention = (heads + 2 * groups) * model.kv_channels, heads * model.kv_channels
    ffn = model.ffn_hidden_size // tp
    shapes = []
    for features_in, features_out in ((h, qkv), (attention, h), (h, 2 * ffn), (ffn, h)):
        shapes += [(s, b, features_in), (features_out, features_in)]
        shapes += [(s, b, features_out), (features_in, features_out)]
        shapes += [(features_out, s * b), (features_in, s * b)]
    # Sequence-parallel shards are quantized before they are gathered.
    return [*shapes, (local, b, h)]


def accepted_by_te(shape: tuple[int, ...], recipe: str) -> bool:
    """Transformer Engine's `assert_dim_for_fp8_exec`, and `MXFP8Quantizer.is_quantizable`."""
    if recipe == "mxfp8":
        return math.prod(shape[:-1]) % 32 == 0 and shape[-1] % 32 == 0
    return math.prod(shape[:-1]) % 8 == 0 and shape[-1] % 16 == 0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """The small config in FP8."""
    config = load_small(tmp_path_factory.mktemp("config"), ["precision.mode=fp8"]).config
    return Facts(config, None, VOCAB_SIZE)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    values=st.fixed_dictionaries(
        {
            "precision.fp8_recipe": st.sampled_from(["delayed", "tensorwise", "blockwise", "mxfp8"]),
            "parallel.tensor_model_parallel_size": st.sampled_from([1, 2]),
            "parallel.sequence_parallel": st.booleans(),
            "model.kv_channels": st.sampled_from([2, 4, 8, 12, 16, 24, 32, 64]),
            "model.ffn_hidden_size": st.sampled_from([16, 24, 32, 48, 64, 96, 128]),
            "model.hidden_size": st.sampled_from([8, 16, 24, 32, 48, 64]),
            "model.seq_length": st.sampled_from([2, 4, 8, 12, 16, 24, 32, 64]),
            "training.micro_batch_size": st.sampled_from([1, 2, 3, 4]),
        }
    ),
    heads=st.sampled_from([(4, 2), (4, 4), (6, 2), (8, 2), (12, 4)]),
)
def test_the_rules_refuse_exactly_what_te_would_refuse(
    small: Facts, values: dict[str, Any], heads: tuple[int, int]
) -> None:
    facts = small.with_value("model.num_attention_heads", heads[0]).with_value("model.num_query_groups", heads[1])
    for key, value in values.items():
        facts = facts.with_value(key, value)
    found = {finding.rule for finding in all_findings(facts) if finding.rule.startswith("FP8")}
    recipe = facts.config.precision.fp8_recipe
    refused = [shape for shape in operands(facts.config) if not accepted_by_te(shape, recipe)]
    assert bool(found) == bool(refused), (found, refused)


@pytest.mark.parametrize(
    ("overrides", "key", "use"),
    [
        (["model.ffn_hidden_size=264"], "model.ffn_hidden_size", "model.ffn_hidden_size=256 or "),
        (["model.ffn_hidden_size=264"], "model.ffn_hidden_size", "model.ffn_hidden_size=288"),
        (["model.hidden_size=136", "model.kv_channels=16"], "model.hidden_size", "size=128 or model.hidden_size=144"),
        (["model.kv_channels=6"], "model.kv_channels", "model.kv_channels=4 or model.kv_channels=8"),
        (["model.num_query_groups=1"], "model.num_query_groups", "model.num_query_groups=2"),
        (["model.seq_length=60"], "model.seq_length", "model.seq_length=56 or model.seq_length=64"),
        (["model.seq_length=24", "training.micro_batch_size=1"], "model.seq_length", "micro_batch_size=2"),
        # Blocks of 32 in both directions.
        (["precision.fp8_recipe=mxfp8", "model.ffn_hidden_size=288"], "model.ffn_hidden_size", "fp8_recipe=blockwise"),
        (
            ["precision.fp8_recipe=mxfp8", "model.ffn_hidden_size=288"],
            "model.ffn_hidden_size",
            "size=256 or model.ffn_",
        ),
    ],
)
def test_the_key_to_change_is_named(tmp_path: Path, overrides: list[str], key: str, use: str) -> None:
    parallel = ["precision.mode=fp8", "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
    problems = check_config(load_small(tmp_path, [*parallel, *overrides]), 2, VOCAB_SIZE)
    assert [problem.key for problem in problems] == [key]
    assert use in problems[0].use_instead
