"""`report.html` and the command `report`: what is read, thinned and shown, and that nothing of the record is markup."""

from __future__ import annotations

import base64
import json
import math
import random
import re
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fp8.commands.report import main
from megatron_fp8.report import run_reader
from megatron_fp8.report.curves import Curve, Keep
from megatron_fp8.report.html import figures, render, report_at_end, tables
from megatron_fp8.report.html.figures import heat_maps, line_figures
from megatron_fp8.report.run_reader import read_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"


def write(directory: Path, records: list[dict[str, Any]], config: str = "training: {train_iters: 4}\n") -> Path:
    directory.mkdir(parents=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text(lines, encoding="utf-8")
    (directory / "config.yaml").write_text(config, encoding="utf-8")
    return directory


def train(iteration: int, loss: Any = 3.0, **values: Any) -> dict[str, Any]:
    return {"event": "train", "iteration": iteration, "lm loss": loss, "time": 1e9 + iteration, **values}


def curve_of(values: np.ndarray, blocks: int, **settings: Any) -> Curve:
    curve = Curve(**settings)
    iterations = np.arange(1.0, len(values) + 1)
    for part in np.array_split(np.arange(len(values)), blocks):
        curve.extend(iterations[part], values[part])
    return curve


@pytest.mark.parametrize("blocks", [1, 7, 500])
def test_thinning_keeps_the_extremes_of_every_bucket_however_values_come(blocks: int) -> None:
    values = np.random.default_rng(3).standard_normal(30_000)
    curve = curve_of(values, blocks, buckets=100)
    x, y = curve.points()
    assert len(y) <= 200
    assert (y == values[x.astype(int) - 1]).all(), "points are of the record"
    # The definition, written once more.
    expected = set()
    for bucket in np.unique(np.arange(1, 30_001) // curve.width):
        members = [at for at in range(1, 30_001) if at // curve.width == bucket]
        expected |= {min(members, key=lambda at: values[at - 1]), max(members, key=lambda at: values[at - 1])}
    assert sorted(expected) == x.astype(int).tolist()
    assert (curve.smallest, curve.largest, curve.last) == (values.min(), values.max(), values[-1])
    assert curve.mean == pytest.approx(values.mean())


def test_short_curves_are_whole_and_a_value_that_is_not_finite_stays_a_gap() -> None:
    x, y = curve_of(np.array([1.0, math.nan, 3.0]), 2).points()
    assert x.tolist() == [1, 2, 3]
    assert np.isnan(y).tolist() == [False, True, False]
    values = np.zeros(10_000)
    values[[17, 5000]] = math.nan, math.inf
    curve = curve_of(values, 9, buckets=50)
    x, y = curve.points()
    assert x[~np.isfinite(y)].tolist() == [18, 5001]
    assert curve.not_finite == 2


@pytest.mark.parametrize(("keep", "reduce"), [(Keep.LARGEST, np.max), (Keep.SMALLEST, np.min)])
def test_a_cell_is_the_worst_value_of_its_iterations(keep: Keep, reduce: Any) -> None:
    values = np.random.default_rng(4).standard_normal(5000)
    curve = curve_of(values, 13, buckets=64, keep=keep)
    numbers, worst = curve.columns(4 * curve.width)
    expected = [reduce(values[np.arange(1, 5001) // (4 * curve.width) == number]) for number in numbers]
    assert worst.tolist() == expected


def test_curves_hold_what_the_record_says(tmp_path: Path) -> None:
    waits = {"data-wait-share": 0.25}
    records = [
        {"event": "start", "device": "one GPU"},
        train(1, 4.0, **{"grad-norm": None, "iteration-time": 2.0, "new/a": 1, "new/b": 2}, **waits),
        train(2, "nan", **{"grad-norm": 0.5, "iteration-time": 4.0, "new/a": 3, "new/b": True}, **waits),
        {"event": "validation", "iteration": 2, "lm loss validation": 3.5, "lm loss validation/web": 3.25,
         "lm loss validation/code": 3.75, "lm loss validation ppl": 33.1},
    ]  # fmt: skip
    run = read_run(write(tmp_path / "run", records))
    made = {figure["title"]: figure for figure in line_figures([run])}
    assert list(made) == ["Loss", "Gradient norm before clipping", "Time per step", "new"]
    loss = {trace["name"]: (trace["x"], trace["y"]) for trace in made["Loss"]["traces"]}
    assert loss == {
        "lm loss": ([1, 2], [4.0, None]),
        "lm loss validation": ([2], [3.5]),
        "lm loss validation/web": ([2], [3.25]),
        "lm loss validation/code": ([2], [3.75]),
    }
    assert made["Loss"]["gaps"] == ["lm loss: 1 values are not finite and leave gaps."]
    assert made["Gradient norm before clipping"]["traces"][0]["x"] == [2], "a norm that is withheld is no point"
    assert {trace["name"]: trace["y"] for trace in made["new"]["traces"]} == {"new/a": [1, 3], "new/b": [2]}
    numbers = {row.name: row.cells for row in tables.numbers([run])}
    assert numbers["Last training loss, nats per token"] == ["4"]
    assert numbers["Validation loss, web, last (best), nats per token"] == ["3.2500 (3.2500)"]
    assert [(part.name, part.seconds, part.share) for part in tables.time_split(run)] == [
        ("waiting for data", 0.75, 0.25),
        ("everything else", 2.25, 0.75),
    ]


def test_parts_norms_nodes_and_traces_have_their_places(tmp_path: Path) -> None:
    parts = {"batch-generator-time": 0.1, "forward-backward-time": 0.2, "other-time": 0.3}
    within = {"forward-backward-time/forward": 0.15, "forward-backward-time/waiting": 0.05}
    nodes = {f"node/{number}/{name}": 1.0 for number in range(40) for name in ("cpu-percent", "gpu-celsius")}
    norms = {"grad-norm/qkv": 3.0, "grad-norm/layers.0/qkv": 1.0, "grad-norm/layers.10/qkv": 2.0, "params-norm": 9.0}
    records = [
        train(1, 4.0, **{"grad-norm": 3.0, "iteration-time": 0.6, "pause-seconds": 1.0}, **parts, **within, **nodes),
        {"event": "norms", "iteration": 1, **norms},
        {
            "event": "profile",
            "iteration": 1,
            "steps": 1,
            "ranks": [3, 4],
            "directory": "d",
            "largest costs": "op <mm>\nx",
        },
    ]
    run = read_run(write(tmp_path / "run", records))
    made = {figure["title"]: [trace["name"] for trace in figure["traces"]] for figure in line_figures([run])}
    assert made["Time per step"] == ["iteration-time"]
    assert made["Parts of a step"] == list(parts)
    assert made["Parts of forward and backward"] == list(within)
    assert made["Gradient norm before clipping"] == ["grad-norm"]
    assert made["Gradient norm by kind of weight"] == ["grad-norm/qkv"]
    assert made["Norm of the master weights"] == ["params-norm"]
    assert made["cpu-percent of nodes"] == [f"node/{number}/cpu-percent" for number in range(16)]
    assert set(run.heat) == {"grad-norm/layers.0/qkv", "grad-norm/layers.10/qkv"}
    assert [(part.name, part.share) for part in tables.time_split(run)] == [
        (name, pytest.approx(seconds / 0.6)) for name, seconds in parts.items()
    ]
    assert tables.profiles(run) == [("Up to iteration 1, rank 3", "op <mm>\nx")]
    (event,) = tables.events(run)
    assert event.text == "profiled the last 1 steps of ranks 3, 4 into d"
    assert "<pre>op &lt;mm&gt;\nx</pre>" in render([run])


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (train(4), "4 of 4 iterations recorded, no end: still running, or killed"),
        ({"event": "end", "iteration": 4, "stopped": None}, "finished 4 of 4 iterations"),
        ({"event": "end", "iteration": 3, "stopped": "SIGTERM"}, "stopped after 3 of 4 iterations because of SIGTERM"),
        (
            {"event": "failure", "kind": "NonFiniteError", "error": "grad-norm is nan"},
            "failed after 2 of 4 iterations: NonFiniteError: grad-norm is nan",
        ),
    ],
)
def test_what_stopped_a_run_is_said(last: dict[str, Any], state: str, tmp_path: Path) -> None:
    run = read_run(write(tmp_path / "run", [train(2), last]))
    assert tables.state(run) == state
    assert state in render([run])


def test_a_line_that_is_being_written_is_left_and_a_broken_one_is_said(tmp_path: Path) -> None:
    directory = write(tmp_path / "run", [train(1)])
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"broken\n[1]\n' + json.dumps(train(2)) + '\n{"event": "train", "iterat')
    (directory / "config.yaml").unlink()
    run = read_run(directory)
    assert run.iteration == 2
    assert run.notes[0] == "2 lines of metrics.jsonl are not records and were skipped: 2, 3."
    assert "config.yaml is missing" in run.notes[1]


def test_heat_maps_are_layers_by_time_with_gaps(tmp_path: Path) -> None:
    name = "fp8/layers.{}/self_attention.proj/input/amax"
    records = [
        {"event": "fp8", "iteration": 10, name.format(0): 2.0, name.format(10): 8.0},
        {"event": "fp8", "iteration": 20, name.format(10): 0.5, name.format(2): 0.0},
        {"event": "fp8-check", "iteration": 20, "fp8/layers.0/self_attention.proj/input/clipped": 0.25},
    ]
    choices = heat_maps([read_run(write(tmp_path / "run", records))])
    assert [choice["label"] for choice in choices] == ["amax by layer", "share clipped by layer"]
    (amax,) = choices[0]["maps"]
    assert (amax["tensor"], amax["x"], amax["y"]) == ("self_attention.proj/input", [10, 20], [0, 2, 10])
    assert amax["z"]["shape"] == "3, 2"
    table = np.frombuffer(base64.b64decode(amax["z"]["bdata"]), "<f4").reshape(3, 2)
    np.testing.assert_array_equal(table, [[1, math.nan], [math.nan, math.nan], [3, -1]])
    assert (choices[0]["low"], choices[0]["high"]) == (-1, 3)
    assert choices[1]["maps"][0]["y"] == [0]


class Scripts(HTMLParser):
    """Tags with their attributes, and the text of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_nothing_from_the_runs_is_markup(tmp_path: Path) -> None:
    cell = f"fp8/layers.0/{EVIL.replace('/', '')}/input/amax"
    records = [
        {
            "event": "start",
            EVIL: EVIL,
            "precision chart": [
                dict.fromkeys(("section_label", "label", "per_label", "format_label"), EVIL) | {"size": 1.0}
            ],
        },
        {"event": "train", "iteration": 1, EVIL.replace("/", ""): 3.0, "lm loss": 3.0},
        {"event": "validation", "iteration": 1, f"lm loss validation/{EVIL}": 1.0, "lm loss validation/b": 1.0},
        {"event": "fp8", "iteration": 1, cell: 1.0, f"fp8/layers.0/a/input/{EVIL.replace('/', '')}": 1.0},
        {"event": EVIL, "iteration": EVIL, EVIL: EVIL},
        {"event": "end", "iteration": 1, "stopped": EVIL},
    ]
    run = read_run(write(tmp_path / "run", records, f'{{"{EVIL}": {{"{EVIL}": "{EVIL}"}}}}'), EVIL)
    page = render([run, run])
    parser = Scripts()
    parser.feed(page)
    tags = [tag for tag, _ in parser.tags]
    assert tags.count("script") == 3, "data, plotly.js and our own"
    assert "img" not in tags
    assert not any(name.startswith("on") for _, attributes in parser.tags for name in attributes)
    assert EVIL not in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))  # type: ignore[union-attr]
    shown = [trace["name"] for figure in data["figures"] for trace in figure["traces"]]
    shown += [one["tensor"] for choice in data["heat"] for one in choice["maps"]]
    assert not any("<" in name for name in shown), "plotly would read it"


def test_a_long_run_takes_little_memory_and_makes_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(5)
    # So that the shorter run fills it too.
    monkeypatch.setattr(run_reader, "_MAX_WAITING", 5_000)

    def peak(num_records: int) -> tuple[int, int]:
        directory = tmp_path / str(num_records)
        records = [train(at, random.random(), **{"grad-norm": random.random()}) for at in range(1, num_records + 1)]
        records += [{"event": "checkpoint", "iteration": at} for at in range(num_records // 10)]
        write(directory, records)
        del records
        tracemalloc.start()
        run = read_run(directory)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most, len(json.dumps(line_figures([run])))

    (memory, size), (memory_of_five, size_of_five) = peak(5_000), peak(25_000)
    assert memory_of_five < 1.2 * memory
    assert size_of_five < 1.6 * size
    assert size_of_five < 100_000


def test_heat_maps_of_a_large_model_stay_within_their_number_of_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MAX_CELLS", 10_000)
    names = [f"fp8/layers.{layer}/m{module}/input/amax" for layer in range(24) for module in range(10)]
    records = [{"event": "fp8", "iteration": at, **dict.fromkeys(names, 1.0)} for at in range(1, 61)]
    (choice,) = heat_maps([read_run(write(tmp_path / "run", records))])
    cells = sum(math.prod(map(int, one["z"]["shape"].split(", "))) for one in choice["maps"])
    # The first and the last bucket may be half empty.
    assert 3_000 < cells <= 10_500
    assert "of 2 iterations" in choice["says"]


def test_the_tool_names_namesakes_and_says_where_runs_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a" / "run", [train(1)], "{optimizer: {lr: 1e-3}, run: {seed: 1}}")
    b = write(tmp_path / "b" / "run", [train(1)], "{optimizer: {lr: 2e-3}, run: {seed: 1}}")
    output = tmp_path / "both.html"
    main([str(a), str(b), "--output", str(output)])
    assert capsys.readouterr().out == f"wrote {output}\n"
    page = output.read_text(encoding="utf-8")
    assert "a/run" in page
    assert "b/run" in page
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["both.html"], "nothing is left beside it"
    differs = page[page.index("Keys that differ") : page.index("<details><summary>config.yaml")]
    assert "optimizer.lr" in differs
    assert "run.seed" not in differs
    main([str(a)])
    assert (a / "report.html").exists()


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, [], "metrics.jsonl does not exist; name a run directory"),
        ("", [], "holds no record of a run"),
        ('{"event": "start"}\n', ["--output", "nowhere/x.html"], "no directory nowhere"),
    ],
)
def test_what_is_no_run_is_explained(
    text: str | None, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    try:
        main([str(tmp_path), *arguments])
        code: Any = 0
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_run_without_steps_has_a_report(tmp_path: Path) -> None:
    page = render([read_run(write(tmp_path / "run", [{"event": "start", "device": "one GPU"}]))])
    assert "No training step has been recorded yet" in page
    assert "one GPU" in page


def test_a_report_that_cannot_be_made_is_said_and_fails_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "run", [train(1)])
    (run / "report.html").mkdir()
    report_at_end(run)
    errors = capsys.readouterr().err
    assert "report.html was not written: IsADirectoryError" in errors
    assert f"write it with python tools/report.py {run}" in errors
    assert not list(run.glob(".report*"))
