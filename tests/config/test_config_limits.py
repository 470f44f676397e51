"""Every number has a range; whatever the extremes of all of them are put together to, the answer comes at once."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from config_samples import VOCAB_SIZE, load_small
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.commands.train_options import describe_world_sizes, summarize
from megatron_fp8.config.check import check_config, fitting_world_sizes
from megatron_fp8.config.config_warnings import config_warnings
from megatron_fp8.config.facts import Facts
from megatron_fp8.config.fields import FieldSpec, config_fields
from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.load import dump_config, load_config
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.planner.gpus import DEFAULT_GPU, GPUS
from megatron_fp8.planner.plan import make_plan
from megatron_fp8.planner.plan_report import plan_text

MAX_CPU_SECONDS = 3.0
NUMBERS = {key: spec for key, spec in config_fields().items() if spec.kind in ("int", "float")}


def ends(spec: FieldSpec) -> tuple[float, float]:
    """The smallest and the largest value that the schema allows."""
    bounds, whole = dict(spec.bounds), spec.kind == "int"
    least, most = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    assert least is not None
    assert most is not None
    if "gt" in bounds:
        least = least + 1 if whole else math.nextafter(least, math.inf)
    if "lt" in bounds:
        most = most - 1 if whole else math.nextafter(most, -math.inf)
    return (int(least), int(most)) if whole else (float(least), float(most))


@pytest.mark.parametrize("spec", NUMBERS.values(), ids=lambda spec: spec.key)
def test_every_number_has_a_smallest_and_a_largest_value(spec: FieldSpec) -> None:
    names = dict(spec.bounds)
    assert names.keys() & {"ge", "gt"}, "nothing says how small it may be"
    assert names.keys() & {"le", "lt"}, "nothing says how large it may be"
    assert all(math.isfinite(limit) for limit in names.values())
    least, most = ends(spec)
    assert least < most
    assert spec.allows(least)
    assert spec.allows(most)
    for value in (least, most):
        # Of a number that becomes FP32 neither end may turn into infinity there.
        assert abs(value) < 3.4e38


@pytest.mark.parametrize("spec", NUMBERS.values(), ids=lambda spec: spec.key)
def test_a_number_beyond_an_end_is_refused_with_the_range_and_its_reason(spec: FieldSpec, tmp_path: Path) -> None:
    least, most = ends(spec)
    beyond = (least - 1, most + 1) if spec.kind == "int" else (-1e300, 1e300)
    for value, side in zip(beyond, ("ge gt", "le lt"), strict=True):
        with pytest.raises(ConfigError) as caught:
            load_small(tmp_path, [f"{spec.key}={value!r}"])
        (problem,) = caught.value.problems
        assert (problem.key, problem.origin) == (spec.key, "command line")
        assert problem.use_instead == spec.description
        name, limit = next((name, limit) for name, limit in spec.bounds if name in side)
        assert name in side
        why = getattr(limit, "why", None)
        assert why is None or why in problem.reason


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("training.seed=4294967296", "4,294,967,295: NumPy's generator"),
        ("parallel.distributed_timeout_minutes=1e18", "overflow in 292 years"),
        ("optimizer.adam_eps=1e-40", "FP32 has no smaller normal number"),
        ("optimizer.weight_decay=1e300", "multiplied by the learning rate"),
        ("model.norm_epsilon=1e300", "dominate the divisor"),
        ("model.num_layers=1000000000", "4,096: every process builds"),
        ("model.hidden_size=1000000000", "exact only up to 2^24"),
        ("optimizer.adam_beta2=0.99999999", "would round to 0"),
        ("model.hidden_dropout=0.9999999999", "scaled by 1 / (1 - p)"),
    ],
)
def test_what_once_passed_and_ruined_the_run_is_refused(override: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 mistake") as caught:
        load_small(tmp_path, [override])
    assert reason in caught.value.problems[0].reason


@pytest.mark.parametrize(
    ("overrides", "key", "use"),
    [
        (
            ["model.seq_length=16777216", "training.micro_batch_size=256", "training.global_batch_size=256"],
            "model.seq_length",
            "training.micro_batch_size=1",
        ),
        (["model.kv_channels=16777216", "model.num_attention_heads=1024"], "model.num_attention_heads", "fewer"),
        (
            ["model.make_vocab_size_divisible_by=1048576", "parallel.tensor_model_parallel_size=4096"],
            "model.make_vocab_size_divisible_by",
            "model.make_vocab_size_divisible_by=128",
        ),
        (
            ["training.train_iters=2147483647", "training.global_batch_size=1048576"],
            "training.train_iters",
            "training.train_iters=1048576",
        ),
        (
            ["training.eval_iters=2147483647", "training.global_batch_size=1048576"],
            "training.eval_iters",
            "training.eval_iters=1048576",
        ),
        (["optimizer.lr=1", "optimizer.weight_decay=1"], "optimizer.weight_decay", "optimizer.weight_decay=0.1"),
        (["optimizer.clip_grad=1e-40"], "optimizer.clip_grad", "optimizer.clip_grad=1.0 or optimizer.clip_grad=0.0"),
    ],
)
def test_products_of_allowed_numbers_have_limits_too(overrides: list[str], key: str, use: str, tmp_path: Path) -> None:
    problems = check_config(load_small(tmp_path, overrides), None, VOCAB_SIZE)
    found = [problem for problem in problems if problem.key == key]
    assert any(use in problem.use_instead for problem in found), problems


# Half of the keys stay as they are: of configs with nothing but extremes most say the same.
EXTREMES = st.fixed_dictionaries({}, optional={key: st.sampled_from(ends(spec)) for key, spec in NUMBERS.items()})
MODES = st.fixed_dictionaries(
    {
        "precision.mode": st.sampled_from(["fp32", "bf16", "fp8"]),
        "precision.first_last_layers_bf16": st.booleans(),
        "model.recompute_granularity": st.sampled_from(["none", "full"]),
        "parallel.sequence_parallel": st.booleans(),
    }
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all examples share."""
    return tmp_path_factory.mktemp("extremes")


def answer(directory: Path, values: dict[str, Any], world_size: int | None) -> bool:
    """What `--check` and `--plan` do for a config with these values, files aside; whether it has no mistake."""
    facts = Facts(load_small(directory).config, None, None)
    for key, value in values.items():
        facts = facts.with_value(key, value)
    path = directory / "extreme.yaml"
    path.write_text(dump_config(facts.config), encoding="utf-8")
    began = time.process_time()
    loaded = load_config(path)
    if world_size is None:
        world_size = next(iter(fitting_world_sizes(loaded.config)), None)
    problems = check_config(loaded, world_size, VOCAB_SIZE)
    config_warnings(loaded, None)
    describe_world_sizes(loaded.config)
    if not problems and world_size is not None:
        layout = derive_layout(loaded.config, world_size, VOCAB_SIZE)
        config_warnings(loaded, layout)
        summarize(loaded.config, layout)
        plan_text(make_plan(loaded.config, layout, GPUS[DEFAULT_GPU]))
    spent = time.process_time() - began
    assert spent < MAX_CPU_SECONDS, f"{spent:.1f} s for {values} on {world_size} ranks"
    return not problems


@pytest.mark.parametrize("spec", NUMBERS.values(), ids=lambda spec: spec.key)
def test_an_end_of_a_range_alone_is_answered_at_once(spec: FieldSpec, directory: Path) -> None:
    for value in ends(spec):
        answer(directory, {spec.key: value}, None)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values=EXTREMES, modes=MODES, world_size=st.sampled_from([None, 1, 2**20]))
def test_all_ends_together_are_answered_at_once(
    directory: Path, values: dict[str, Any], modes: dict[str, Any], world_size: int | None
) -> None:
    answer(directory, {**values, **modes}, world_size)


@pytest.mark.parametrize(
    "values",
    [
        {"model.num_layers": 2**12, "precision.mode": "fp8"},
        {"model.num_layers": 2**12, "parallel.pipeline_model_parallel_size": 2**12, "precision.mode": "fp8"},
        {"training.global_batch_size": 2**20, "training.micro_batch_size": 1},
        {
            "model.num_layers": 2**12,
            "parallel.pipeline_model_parallel_size": 2,
            "parallel.virtual_pipeline_model_parallel_size": 2**11,
            "training.global_batch_size": 2**20,
            "training.micro_batch_size": 1,
            "training.train_iters": 1000,
        },
    ],
)
def test_the_largest_that_can_run_are_planned_at_once(values: dict[str, Any], directory: Path) -> None:
    assert answer(directory, values, None)
