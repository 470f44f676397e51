"""`compare_runs` finds the first step where two runs differ, and in what."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.commands.compare_runs import main

NUM_STEPS = 40


def records() -> list[dict[str, Any]]:
    """Of a run of 40 steps with a resume in between."""
    made: list[dict[str, Any]] = [{"event": "start", "device": "x", "time": 1.0}]
    for iteration in range(1, NUM_STEPS + 1):
        step = {"iteration": iteration, "time": 2.0 * iteration}
        made.append({"event": "fp8", "fp8/layers.0/self_attention.proj/input/amax": 1.5 + iteration, **step})
        made.append(
            {
                "event": "train",
                "lm loss": 1 / iteration,
                "grad-norm": None,
                "tokens-per-second": 5.0 * iteration,
                **step,
            }
        )
        if iteration % 10 == 0:
            made.append({"event": "validation", "lm loss validation": 2 / iteration, **step})
    return [*made, {"event": "end", "iteration": NUM_STEPS, "seconds": 3.0}]


def write(directory: Path, made: list[dict[str, Any]], config: str = "run: {name: a}\ntraining: {seed: 1}\n") -> Path:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in made), encoding="utf-8")
    (directory / "config.yaml").write_text(config, encoding="utf-8")
    return directory


@dataclass(frozen=True)
class Answer:
    code: int
    output: str
    errors: str


Compare = Callable[..., Answer]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Compare:
    def call(*arguments: Path | str) -> Answer:
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return Answer(code, *capsys.readouterr())

    return call


def changed(made: list[dict[str, Any]], event: str, iteration: int, name: str, value: Any) -> list[dict[str, Any]]:
    return [
        {**record, name: value} if record["event"] == event and record["iteration"] == iteration else record
        for record in made
    ]


def test_runs_that_differ_in_time_and_config_alone_are_equal_and_say_so(tmp_path: Path, compare: Compare) -> None:
    a = write(tmp_path / "a", records())
    other = [
        {key: {"time": 99.0, "tokens-per-second": 1.0}.get(key, value) for key, value in record.items()}
        for record in records()
    ]
    other.insert(30, {"event": "resume", "checkpoint": "there", "iteration": 9})
    b = write(tmp_path / "b", other, "run: {name: b}\ntraining: {seed: 1}\n")
    ended = compare(a, b)
    assert ended.code == 0, ended
    assert "equal: 40 recorded steps, 4 series" in ended.output
    assert "not compared: time, speed and memory (--all compares them): train: tokens-per-second" in ended.output
    assert "config keys that differ: 1\n  run.name: a and b" in ended.output
    ended = compare(a, b, "--all")
    assert ended.code == 1
    assert "train: tokens-per-second: first at iteration 1: 5.0 and 1.0; differs in 40 steps" in ended.output


def test_the_last_bit_of_one_number_is_found_and_a_tolerance_forgives_it(tmp_path: Path, compare: Compare) -> None:
    a = write(tmp_path / "a", records())
    b = write(tmp_path / "b", changed(records(), "train", 17, "lm loss", 1 / 17 + 2**-57))
    assert 1 / 17 + 2**-57 != 1 / 17
    ended = compare(a, b)
    assert ended.code == 1, ended
    assert "different from iteration 17 (" in ended.output
    assert (
        f"train: lm loss: first at iteration 17: {1 / 17!r} and {1 / 17 + 2**-57!r}; differs in 1 steps" in ended.output
    )
    assert compare(a, b, "--rtol", "1e-12").code == 0
    assert compare(a, b, "--atol", "1e-12").code == 0
    ended = compare(a, b, "--ignore", "train: lm")
    assert ended.code == 0, ended
    assert "not compared because of --ignore: 1 series" in ended.output


@pytest.mark.parametrize(
    ("event", "iteration", "name", "value", "message"),
    [
        ("train", 5, "grad-norm", 0.5, "train: grad-norm: first at iteration 5: null and 0.5"),
        ("train", 5, "lm loss", "nan", "train: lm loss: first at iteration 5: 0.2 and nan"),
        ("validation", 20, "lm loss validation", -0.1, "by at most 0.2"),
        (
            "validation",
            20,
            "lm loss validation/web",
            0.1,
            "series recorded only in B: 1, the first at iteration 20",
        ),
    ],
)
def test_what_differs_is_named(
    event: str, iteration: int, name: str, value: Any, message: str, tmp_path: Path, compare: Compare
) -> None:
    a = write(tmp_path / "a", records())
    b = write(tmp_path / "b", changed(records(), event, iteration, name, value))
    ended = compare(a, b, "--rtol", "0.01")
    assert ended.code == 1, ended
    assert message in ended.output
    assert f"different from iteration {iteration} (" in ended.output


def test_what_a_run_did_about_a_step_counts(tmp_path: Path, compare: Compare) -> None:
    spike = {"event": "spike", "iteration": 20, "lm loss": 9.0, "limit": 5.0, "reason": "9 > 5"}
    slow = {"event": "slow-rank", "iteration": 20, "rank": 3}
    made = records()
    place = next(index for index, record in enumerate(made) if record.get("iteration") == 20)
    a = write(tmp_path / "a", made)
    b = write(tmp_path / "b", [*made[:place], slow, spike, *made[place:]])
    ended = compare(a, b)
    assert ended.code == 1, ended
    assert "series recorded only in B: 3, the first at iteration 20: spike: lm loss" in ended.output
    assert "slow-rank" not in ended.output


def test_a_sign_of_zero_is_a_difference_bit_for_bit(tmp_path: Path, compare: Compare) -> None:
    a = write(tmp_path / "a", changed(records(), "train", 3, "lm loss", 0.0))
    b = write(tmp_path / "b", changed(records(), "train", 3, "lm loss", -0.0))
    assert compare(a, b).code == 1
    assert compare(a, b, "--atol", "1e-30").code == 0


def test_a_run_that_is_shorter_differs_from_where_it_ends(tmp_path: Path, compare: Compare) -> None:
    a = write(tmp_path / "a", records())
    short = [record for record in records() if record.get("iteration", 0) <= 30]
    b = write(tmp_path / "b", short)
    # It goes on: the line that is being written is not read.
    with (b / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "iterat')
    ended = compare(a, b)
    assert ended.code == 1, ended
    assert "different from iteration 31 (30 steps are recorded in both runs)" in ended.output
    assert "steps recorded only in A: 10, from iteration 31" in ended.output


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, (), "metrics.jsonl does not exist; name a run directory"),
        ('{"event": "start"}\n', (), "has no recorded step yet"),
        ('{"event": "start"}\n{"event"\n', (), "line 2 is not a record of a run"),
        ('{"event": "train", "iteration": 5}\n{"event": "train", "iteration": 4}\n', (), "back from iteration 5 to 4"),
        ('{"event": "train"}\n', (), "has a train record without iteration"),
        ('{"event": "train", "iteration": 1}\n', (), "config.yaml is missing"),
        (None, ("--rtol", "-1"), "--rtol -1.0 is not a tolerance"),
        (None, ("--ignore", "("), "--ignore ( is not a regular expression"),
    ],
)
def test_wrong_input_is_explained(
    text: str | None, arguments: tuple[str, ...], message: str, tmp_path: Path, compare: Compare
) -> None:
    a = write(tmp_path / "a", records())
    b = tmp_path / "b"
    b.mkdir()
    if text is not None:
        (b / "metrics.jsonl").write_text(text, encoding="utf-8")
    ended = compare(a, b, *arguments)
    assert ended.code == 2, ended
    assert message in ended.errors
