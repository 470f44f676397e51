"""Properties over many configs: writing and reading back, no crash on damaged text, suggestions that hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_samples import SMALL, VOCAB_SIZE, load_small
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.config.check import all_findings, check_config, fitting_world_sizes
from megatron_fp8.config.config_warnings import config_warnings
from megatron_fp8.config.facts import WORLD_SIZE, Facts, to_problem
from megatron_fp8.config.fields import FieldSpec, config_fields
from megatron_fp8.config.load import dump_config, load_config
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.config.schema import Config

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
# `key=value` or `N ranks`, and the keys that have to change with it.
SUGGESTION = re.compile(
    r"(?:^| )(?:([a-z_]+\.[a-z0-9_]+)=(\[[^]]*\]|[^ ;]+)|(\d+) ranks)(?: \(and then another ([^)]*)\))?"
)


def integer_range(spec: FieldSpec) -> tuple[int, int]:
    """The integers that the schema allows; it has no other bounds for them than `ge` and `le`."""
    bounds = dict(spec.bounds)
    assert set(bounds) <= {"ge", "le"}
    return int(bounds.get("ge", -3)), int(bounds.get("le", 2**62))


# Items of a list by its kind.
ITEMS = {
    "strings": TEXT,
    "ints": st.integers(-(2**62), 2**62),
    "floats": st.floats(-1e30, 1e30),
    "bools": st.booleans(),
}


def values_of(spec: FieldSpec) -> st.SearchStrategy[Any]:
    """Values that the schema allows for a key."""
    if spec.kind == "choice":
        values: st.SearchStrategy[Any] = st.sampled_from(spec.choices)
    elif spec.kind == "bool":
        values = st.booleans()
    elif spec.kind == "int":
        values = st.integers(*integer_range(spec))
    elif spec.kind == "float":
        bounds = dict(spec.bounds)
        least, most = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
        values = st.floats(
            least, most, exclude_min="gt" in bounds, exclude_max="lt" in bounds, allow_nan=False, allow_infinity=False
        )
    elif spec.kind in ITEMS:
        values = st.lists(ITEMS[spec.kind], min_size=spec.length or 0, max_size=spec.length or 4)
    else:
        values = st.from_regex(spec.pattern, fullmatch=True) if spec.pattern else TEXT
    return values | st.none() if spec.optional else values


CONFIGS = st.fixed_dictionaries(
    {
        # Loading replaces the path of another file by what the file says.
        key: st.none() if key == "precision.from_accelerate" else values_of(spec)
        for key, spec in config_fields().items()
    }
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all examples of a test share."""
    return tmp_path_factory.mktemp("configs")


def nested(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Values by dotted key as sections."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


@settings(max_examples=15, deadline=None, derandomize=True)
@given(values=CONFIGS)
def test_a_written_config_reads_back_equal(directory: Path, values: dict[str, Any]) -> None:
    reads_back_equal(directory, values)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(values=CONFIGS)
def test_many_written_configs_read_back_equal(directory: Path, values: dict[str, Any]) -> None:
    reads_back_equal(directory, values)


def reads_back_equal(directory: Path, values: dict[str, Any]) -> None:
    config = Config.model_validate(nested(values))
    text = dump_config(config)
    path = directory / "dumped.yaml"
    path.write_text(text, encoding="utf-8")
    loaded = load_config(path)
    assert loaded.config == config
    assert "default" not in loaded.origins.values()
    # Other programs read YAML 1.1.
    assert Config.model_validate(yaml.safe_load(text)) == config
    with_origins = dump_config(config, loaded.origins)
    assert yaml.safe_load(with_origins) == yaml.safe_load(text)
    for spec in config_fields().values():
        assert spec.doc.split()[0] in text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    edits=st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 3), st.text("abc:{}[]'\"!&*#-,|>%@\n\t 019.\x00é", max_size=4)),
        min_size=1,
        max_size=6,
    ),
    world_size=st.none() | st.integers(1, 64),
)
def test_damaged_text_is_a_config_error_or_a_config(
    directory: Path, edits: list[tuple[float, int, str]], world_size: int | None
) -> None:
    text = SMALL
    for place, removed, added in edits:
        at = int(place * len(text))
        text = text[:at] + added + text[at + removed :]
    load_or_refuse(directory, text, [], world_size)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    keys=st.lists(st.sampled_from(list(config_fields())), min_size=1, max_size=6),
    values=st.lists(
        st.sampled_from(
            [
                *(
                    "0",
                    "1",
                    "2",
                    "3",
                    "7",
                    "16",
                    "-1",
                    "1e-4",
                    "9223372036854775807",
                    "1e18",
                    "null",
                    "true",
                    "off",
                    "''",
                ),
                *("[]", "[a]", "[1, a]", "{}", "x", "fp8", "WSD", ".nan", "[", "&a", "*a", "!!int 3", "1:30", "'"),
            ]
        ),
        min_size=6,
        max_size=6,
    ),
    world_size=st.none() | st.integers(1, 64),
)
def test_wrong_values_are_a_config_error_or_a_config(
    directory: Path, keys: list[str], values: list[str], world_size: int | None
) -> None:
    overrides = [f"{key}={value}" for key, value in zip(keys, values, strict=False)]
    load_or_refuse(directory, SMALL, overrides, world_size)


def load_or_refuse(directory: Path, text: str, overrides: list[str], world_size: int | None) -> None:
    """Load and check; only a ConfigError with well-formed problems may come out."""
    path = directory / "mutated.yaml"
    path.write_text(text, encoding="utf-8")
    loaded, problems = None, []
    try:
        loaded = load_config(path, overrides)
    except ConfigError as error:
        problems = list(error.problems)
    assert (loaded is None) == bool(problems)
    problems += check_config(loaded, world_size, VOCAB_SIZE) if loaded else []
    assert all(problem.reason and problem.use_instead and problem.origin for problem in problems)
    if loaded is None:
        return
    config_warnings(loaded, None)
    fitting_world_sizes(loaded.config)


SIZES = st.fixed_dictionaries(
    {
        "model.num_layers": st.integers(1, 9),
        "model.hidden_size": st.sampled_from([64, 96, 100, 128, 130, 768]),
        "model.num_attention_heads": st.sampled_from([1, 3, 4, 6, 8, 12]),
        "model.num_query_groups": st.sampled_from([None, 1, 2, 3, 4, 8]),
        "model.kv_channels": st.sampled_from([None, 7, 8, 16, 20]),
        "model.ffn_hidden_size": st.sampled_from([None, 100, 120, 128, 1376]),
        "model.seq_length": st.sampled_from([12, 30, 64, 100, 128]),
        "model.rotary_percent": st.sampled_from([0.25, 0.3, 1.0]),
        "model.position_embedding_type": st.sampled_from(["rope", "learned_absolute"]),
        "model.max_position_embeddings": st.sampled_from([None, 32, 128]),
        "model.recompute_granularity": st.sampled_from(["none", "full"]),
        "model.recompute_num_layers": st.sampled_from([None, 0, 2, 5]),
        "model.vocab_size": st.sampled_from([None, 900, 1000]),
        "precision.mode": st.sampled_from(["fp32", "fp16", "bf16", "fp8", "fp8", "fp8"]),
        "precision.fp8_recipe": st.sampled_from(["delayed", "tensorwise", "blockwise", "mxfp8"]),
        "precision.fp8_format": st.sampled_from([None, "hybrid", "e4m3"]),
        "precision.amax_reduction": st.sampled_from(["auto", "data_parallel", "off"]),
        "precision.override_linear_precision": st.sampled_from([[False] * 3, [True] * 3, [False, False, True]]),
        "precision.fp8_param_gather": st.booleans(),
        "precision.first_last_layers_bf16": st.booleans(),
        "precision.num_layers_at_start_in_bf16": st.integers(0, 5),
        "precision.num_layers_at_end_in_bf16": st.integers(0, 5),
        "precision.bf16_layers": st.lists(st.integers(-1, 5), max_size=4),
        "precision.main_params_dtype": st.sampled_from(["fp32", "fp16"]),
        "precision.main_grads_dtype": st.sampled_from(["fp32", "bf16"]),
        "precision.exp_avg_sq_dtype": st.sampled_from(["fp32", "fp8"]),
        "precision.loss_scale": st.sampled_from([None, 1.0]),
        "precision.initial_loss_scale": st.sampled_from([0.5, 2.0**32]),
        "precision.min_loss_scale": st.sampled_from([1.0, 2.0**40]),
        "precision.fp8_fallback": st.booleans(),
        "precision.fp8_health_interval": st.sampled_from([0, 100]),
        "parallel.tensor_model_parallel_size": st.sampled_from([1, 2, 3, 4]),
        "parallel.pipeline_model_parallel_size": st.sampled_from([1, 2, 3, 4]),
        "parallel.virtual_pipeline_model_parallel_size": st.sampled_from([None, 2, 3]),
        "parallel.sequence_parallel": st.booleans(),
        "parallel.use_distributed_optimizer": st.booleans(),
        "parallel.overlap_grad_reduce": st.booleans(),
        "parallel.overlap_param_gather": st.booleans(),
        "training.micro_batch_size": st.sampled_from([1, 2, 3, 4]),
        "training.global_batch_size": st.integers(1, 50),
        "training.train_iters": st.sampled_from([1, 2, 50, 100]),
        "optimizer.lr": st.sampled_from([1e-4, 3e-4]),
        "optimizer.min_lr": st.sampled_from([0.0, 1e-4, 1e-3]),
        "optimizer.lr_warmup_init": st.sampled_from([0.0, 1e-3]),
        "optimizer.lr_warmup_iters": st.sampled_from([0, 1, 40, 100]),
        "optimizer.lr_decay_iters": st.sampled_from([None, 40, 200]),
        "optimizer.lr_decay_style": st.sampled_from(["cosine", "WSD"]),
        "optimizer.lr_wsd_decay_iters": st.sampled_from([None, 10, 90]),
        "training.eval_iters": st.sampled_from([0, 10]),
    }
)


@pytest.fixture(scope="module")
def build(directory: Path) -> Callable[[dict[str, Any]], Config]:
    """A small config with other values."""
    small = load_small(directory).config

    def with_values(values: dict[str, Any]) -> Config:
        facts = Facts(small, None, None)
        for key, value in values.items():
            facts = facts.with_value(key, value)
        return facts.config

    return with_values


@settings(max_examples=12, deadline=None, derandomize=True)
@given(values=SIZES, world_size=st.none() | st.integers(1, 16))
def test_every_suggested_value_passes_when_used(
    directory: Path, build: Callable[[dict[str, Any]], Config], values: dict[str, Any], world_size: int | None
) -> None:
    suggestions_pass(directory, build(values), world_size)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True)
@given(values=SIZES, world_size=st.none() | st.integers(1, 16))
def test_every_suggested_value_passes_for_many_configs(
    directory: Path, build: Callable[[dict[str, Any]], Config], values: dict[str, Any], world_size: int | None
) -> None:
    suggestions_pass(directory, build(values), world_size)


def suggestions_pass(directory: Path, config: Config, world_size: int | None) -> None:
    facts = Facts(config, world_size, VOCAB_SIZE)
    path = directory / "suggested.yaml"
    path.write_text(dump_config(facts.config), encoding="utf-8")
    before = {finding.identity for finding in all_findings(facts)}
    for finding in all_findings(facts):
        text = to_problem(finding, facts, all_findings, {}).use_instead
        for key, value, ranks, others in SUGGESTION.findall(text):
            if ranks:
                changed = facts.with_value(WORLD_SIZE, int(ranks))
            else:
                # As a person would: through the command line.
                changed = Facts(load_config(path, [f"{key}={value}"]).config, world_size, VOCAB_SIZE)
            after = {other.identity for other in all_findings(changed)}
            assert finding.identity not in after, (finding, key, value)
            assert {key for _, key in after - before} == set(others.split(" and ")) - {""}, (finding, key, value)


@pytest.mark.parametrize("text", ["\x85", "a\u2028b", " a ", "null", "off", "1e-4", "ü", "a: b", "'", "#", "\n", "- a"])
def test_texts_that_yaml_could_misread_read_back_equal(tmp_path: Path, text: str) -> None:
    small = load_small(tmp_path).config
    data = small.data.model_copy(update={"tokenizer_model": text, "train_data_path": [text, text]})
    config = small.model_copy(update={"data": data})
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path).config == config
    assert Config.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))) == config


def test_the_suggestion_pattern_finds_suggestions(tmp_path: Path) -> None:
    loaded = load_small(tmp_path, ["model.ffn_hidden_size=257", "parallel.tensor_model_parallel_size=2"])
    uses = [problem.use_instead for problem in check_config(loaded, 3, VOCAB_SIZE)]
    found = [match for use in uses for match in SUGGESTION.findall(use)]
    assert ("model.ffn_hidden_size", "256", "", "") in found
    assert ("", "", "2", "") in found
