"""Where values come from: files, bases, the command line; and every mistake at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_samples import SMALL, load_small, write

from megatron_fp8.config.load import load_config
from megatron_fp8.config.problem import ConfigError, Problem


def problems_of(path: Path, overrides: list[str] | None = None) -> dict[str, Problem]:
    """The mistakes by key; a test that expects two of one key counts them itself."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides or [])
    return {problem.key: problem for problem in caught.value.problems}


def test_origins_name_the_line_the_command_line_and_the_default(tmp_path: Path) -> None:
    loaded = load_small(tmp_path, ["optimizer.lr=2e-3"])
    path = tmp_path / "config.yaml"
    assert loaded.config.optimizer.lr == 2e-3
    assert loaded.origins["optimizer.lr"] == "command line"
    assert loaded.origins["model.num_layers"] == f"{path}:4"
    assert loaded.origins["optimizer.min_lr"] == "default"
    with pytest.raises(TypeError):
        loaded.origins["optimizer.lr"] = "elsewhere"  # type: ignore[index]


def test_a_chain_of_bases_is_relative_to_each_file_and_later_values_win(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, SMALL, "root.yaml")
    write(tmp_path / "deep", "base: ../root.yaml\nmodel: {num_layers: 8, seq_length: 32}\n", "middle.yaml")
    path = write(tmp_path, "base: deep/middle.yaml\nmodel:\n  num_layers: 12\n", "top.yaml")
    loaded = load_config(path, ["model.hidden_size=256"])
    model = loaded.config.model
    assert (model.num_layers, model.seq_length, model.hidden_size, model.ffn_hidden_size) == (12, 32, 256, 256)
    assert loaded.origins["model.num_layers"] == f"{path}:3"
    assert loaded.origins["model.seq_length"] == f"{tmp_path / 'deep' / 'middle.yaml'}:2"
    assert loaded.origins["model.ffn_hidden_size"] == f"{tmp_path / 'root.yaml'}:8"


def test_a_circle_of_bases_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "base: b.yaml\n" + SMALL, "a.yaml")
    write(tmp_path, "base: c.yaml\n", "b.yaml")
    write(tmp_path, "base: b.yaml\n", "c.yaml")
    problem = problems_of(path)["base"]
    b, c = tmp_path / "b.yaml", tmp_path / "c.yaml"
    assert f"{b} -> {c} -> {b}" in problem.reason
    assert problem.origin == f"{c}:1"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optimizer: {lr: 1e-4}", "optimizer.lr", 1e-4),
        ("optimizer: {lr: '1e-4'}", "optimizer.lr", 1e-4),
        ("optimizer: {lr: 1}", "optimizer.lr", 1.0),
        ("optimizer: {lr: .5}", "optimizer.lr", 0.5),
        ("precision: {amax_reduction: off}", "precision.amax_reduction", "off"),
        ("precision: {amax_reduction: OFF}", "precision.amax_reduction", "off"),
        ("precision: {mode: FP8}", "precision.mode", "fp8"),
        ("optimizer: {lr_decay_style: wsd}", "optimizer.lr_decay_style", "WSD"),
        ("model: {recompute_granularity: none}", "model.recompute_granularity", "none"),
        ("model: {recompute_num_layers: none}", "model.recompute_num_layers", None),
        ("model: {num_query_groups: ~}", "model.num_query_groups", None),
        ("model: {num_query_groups: }", "model.num_query_groups", None),
        ("parallel: {sequence_parallel: on}", "parallel.sequence_parallel", True),
        ("parallel: {sequence_parallel: No}", "parallel.sequence_parallel", False),
        ("training: {train_iters: 1e6}", "training.train_iters", 1_000_000),
        ("training: {train_iters: 1_000}", "training.train_iters", 1000),
        ("training: {seed: 010}", "training.seed", 10),
        ("parallel: {context_parallel_size: 1}", "parallel.context_parallel_size", 1),
        ("run: {name: 2026-01-01}", "run.name", "2026-01-01"),
        ("run: {name: 125}", "run.name", "125"),
        ("run: {root: on}", "run.root", "on"),
        ("data: {train_data_path: [0.3, a, 0.7, b]}", "data.train_data_path", ["0.3", "a", "0.7", "b"]),
        ("data: {train_data_path: one}", "data.train_data_path", ["one"]),
        ("data: {data_cache_path: 'null'}", "data.data_cache_path", "null"),
        ("data:", "data.num_workers", 1),
        ("data: {}", "data.num_workers", 1),
    ],
)
def test_a_value_is_read_as_its_key_means_it(tmp_path: Path, text: str, key: str, value: object) -> None:
    write(tmp_path, SMALL, "root.yaml")
    config = load_config(write(tmp_path, f"base: root.yaml\n{text}\n")).config
    section, _, name = key.partition(".")
    read = getattr(getattr(config, section), name)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("training.train_iters=4.5", "not an integer"),
        ("training.train_iters=true", "not an integer"),
        ("training.train_iters=1e400", "not an integer"),
        ("training.train_iters=" + "9" * 5000, "not an integer"),
        ("training.train_iters=1e30", "64 bits"),
        ("training.train_iters=[1]", "not a list"),
        ("training.train_iters={a: 1}", "not a mapping"),
        ("training.train_iters=null", "null is not allowed"),
        ("training.train_iters=-1", "at least 0"),
        ("optimizer.lr=fast", "not a number"),
        ("optimizer.lr=.inf", "not a number, at least"),
        ("optimizer.lr=nan", "not a number, at least"),
        ("optimizer.lr=!!python/object:os.system 3", "not allowed"),
        ("optimizer.adam_beta1=1", "at most 0.99999988"),
        ("parallel.sequence_parallel=2", "neither true nor false"),
        ("model.activation=swigloo", "not one of"),
        ("parallel.context_parallel_size=2", "not one of 1"),
        ("data.train_data_path=[[a]]", "item 1 is not a string"),
        ("data.train_data_path=[a, '']", "item 2 is empty"),
        ("run.name=../up", "matching"),
    ],
)
def test_a_wrong_value_is_reported_with_its_key(tmp_path: Path, override: str, reason: str) -> None:
    problems = problems_of(write(tmp_path), [override])
    key, _, value = override.partition("=")
    assert list(problems) == [key]
    assert reason in problems[key].reason
    assert problems[key].value == value
    assert problems[key].origin == "command line"
    assert problems[key].use_instead


def test_a_choice_names_the_nearest_one(tmp_path: Path) -> None:
    assert problems_of(write(tmp_path), ["model.activation=swigloo"])["model.activation"].use_instead == "swiglu"


@pytest.mark.parametrize(
    ("key", "use"),
    [
        ("model.hiden_size", "model.hidden_size"),
        ("model.lr", "optimizer.lr"),
        ("num_layers", "model.num_layers"),
        ("optimiser.lr", "optimizer.lr"),
        ("parallel.tensor-model-parallel-size", "parallel.tensor_model_parallel_size"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("training.batch_size", "training.micro_batch_size or training.global_batch_size"),
        ("modle", "section model"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path, key: str, use: str) -> None:
    section, dot, name = key.partition(".")
    text = f"base: root.yaml\n{section}:\n  {name}: 3\n" if dot else f"base: root.yaml\n{key}: 3\n"
    write(tmp_path, SMALL, "root.yaml")
    path = write(tmp_path, text)
    problem = problems_of(path)[key]
    assert problem.use_instead == use
    assert problem.origin == f"{path}:{3 if dot else 2}"


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    write(tmp_path, SMALL.replace("  num_layers: 4\n", "  num_layers: four\n"), "root.yaml")
    text = "base: root.yaml\nmodel:\n  seq_length: 8\n  seq_length: 9\n  hidden: 1\nparallel: 3\nfoo: {bar: 1}\n"
    overrides = ["optimizer.lr=0", "training.seed", "model.hidden_size=[", "precision.mode=fp9"]
    path = write(tmp_path, text)
    problems = problems_of(path, overrides)
    assert set(problems) == {
        *("model.num_layers", "model.seq_length", "model.hidden", "parallel", "foo.bar"),
        *("optimizer.lr", "override", "model.hidden_size", "precision.mode"),
    }
    assert problems["model.seq_length"].origin == f"{path}:4"
    assert "first defined on line 3" in problems["model.seq_length"].reason
    text = str(ConfigError.from_problems(list(problems.values())))
    for problem in problems.values():
        for part in (problem.key, problem.reason, problem.use_instead, problem.origin):
            assert part in text


def test_missing_keys_are_reported_with_what_they_are(tmp_path: Path) -> None:
    problems = problems_of(write(tmp_path, "run: {name: x}\nmodel: {num_layers: 1}\n"))
    assert set(problems) == {
        *("model.hidden_size", "model.num_attention_heads", "model.seq_length", "optimizer.lr"),
        *("training.micro_batch_size", "training.global_batch_size"),
    }
    assert "Tokens per training sample" in problems["model.seq_length"].reason


def test_a_wrong_value_that_is_overridden_is_no_mistake(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL.replace("lr: 1e-3", "lr: fast"))
    assert load_config(path, ["optimizer.lr=1"]).config.optimizer.lr == 1.0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"model:\n  a: [1\nb: 2\n", "not valid YAML"),
        (b"model:\n\tnum_layers: 1\n", "not valid YAML"),
        (b"model: \xff\n", "not UTF-8"),
        (b"model: \x07\n", "not valid YAML"),
        (b"- a\n- b\n", "mapping of sections"),
        (b"a: 1\n---\nb: 1\n", "not valid YAML"),
        (b"model: " + b"[" * 1500, "nested too deeply"),
        (b"? [a]\n: 1\n", "must be plain text"),
        (b"base: [a, b]\n", "path of a single file"),
    ],
)
def test_a_file_that_is_no_config_says_why(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert any(reason in problem.reason for problem in caught.value.problems)


def test_a_syntax_error_names_its_line_and_no_missing_keys(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "logging: {log_interval: 3\n\n")
    problems = problems_of(path)
    assert list(problems) == ["(YAML)"]
    assert problems["(YAML)"].origin.startswith(f"{path}:2")


def test_a_missing_file_and_a_missing_base_name_who_asked(tmp_path: Path) -> None:
    missing = problems_of(tmp_path / "none.yaml")["CONFIG"]
    assert (missing.value, missing.origin) == (str(tmp_path / "none.yaml"), "command line")
    path = write(tmp_path, f"# a comment\nbase: none.yaml\n{SMALL}")
    base = problems_of(path)["base"]
    assert (base.value, base.origin) == (str(tmp_path / "none.yaml"), f"{path}:2")
    assert set(problems_of(tmp_path)) == {"CONFIG"}
