"""One registry says where each series is shown: an entry added there alone is found in every view."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from sink_files import tensorboard_scalars

from megatron_fp8.commands import compare_runs, dashboard
from megatron_fp8.report import series_registry
from megatron_fp8.report.console import LiveLine, format_record
from megatron_fp8.report.html import render
from megatron_fp8.report.record import read_records
from megatron_fp8.report.run_reader import read_run
from megatron_fp8.report.series import Column, Kind, Registry, Section, Series
from megatron_fp8.report.series_registry import OTHER_FP8, SERIES_EVENTS, find, layer_maps, named_values, series_of
from megatron_fp8.report.tensorboard_sink import TensorBoardSink

OLD_RUN = Path(__file__).parent / "old_run"
MADE_UP = Series(
    "moon-phase",
    "Phase of the moon",
    "degrees",
    Kind.MACHINE,
    section=Section.THROUGHPUT,
    note="Of the last step.",
    console=Column("moon {:.1f}"),
    live=Column("moon {:.0f}", worth=9),
)
TRAIN = {"event": "train", "iteration": 1, "lm loss": 3.0, "moon-phase": 45.25, "time": 1.0}


@pytest.fixture
def with_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_registry, "REGISTRY", Registry([*series_registry.REGISTRY.entries, MADE_UP]))


def write(directory: Path, record: dict[str, object]) -> Path:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    (directory / "config.yaml").write_text("training: {train_iters: 4}\n", encoding="utf-8")
    return directory


@pytest.mark.usefixtures("with_made_up")
def test_an_entry_alone_shows_a_series_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert format_record(TRAIN, 4) == "iteration 1/4 | lm loss 3.0000 | moon 45.2"
    terminal = io.StringIO()
    live_line = LiveLine(Console(file=terminal, force_terminal=True, width=100), 4, 0)
    live_line.update(TRAIN)
    live_line.close()
    assert "moon 45" in terminal.getvalue()

    a, b = write(tmp_path / "a", TRAIN), write(tmp_path / "b", {**TRAIN, "moon-phase": 90.0})
    page = render([read_run(a)])
    assert "Phase of the moon" in page
    assert "Of the last step." in page

    sink = TensorBoardSink(tmp_path / "tensorboard", -1)
    sink.write(TRAIN)
    sink.close()
    assert tensorboard_scalars(tmp_path / "tensorboard")["moon-phase"] == [(1, 1.0, 45.25)]

    assert dashboard.panels(Section.THROUGHPUT)["Phase of the moon (degrees)"] == ["moon-phase"]
    assert "moon-phase" in dashboard.saved_view("team", "gpt")

    # It is of the machine: equal runs may differ in it.
    with pytest.raises(SystemExit) as ended:
        compare_runs.main([str(a), str(b)])
    assert ended.value.code == 0
    assert "--all compares them): train: moon-phase" in capsys.readouterr().out


def test_every_series_of_a_recorded_run_is_listed() -> None:
    names = {
        name
        for record in read_records(OLD_RUN / "metrics.jsonl")
        if record["event"] in SERIES_EVENTS
        for name, value in named_values(record)
        if not isinstance(value, str | list)
    }
    assert len(names) > 50
    missing = {name for name in names if (found := find(name)) is None or found.series is OTHER_FP8}
    assert missing == set()


def test_no_two_entries_have_the_same_name_and_every_one_a_title() -> None:
    names = [entry.name for entry in series_registry.REGISTRY.entries]
    assert len(names) == len(set(names))
    assert all(entry.title for entry in series_registry.REGISTRY.entries)


@pytest.mark.parametrize(
    ("name", "entry", "fields"),
    [
        ("lm loss validation/web", "lm loss validation/{set}", {"set": "web"}),
        ("lm loss validation ppl/web", "lm loss validation ppl/{set}", {"set": "web"}),
        ("grad-norm/qkv", "grad-norm/{kind}", {"kind": "qkv"}),
        ("grad-norm/layers.10/qkv", "grad-norm/layers.{layer}/{tensor}", {"layer": "10", "tensor": "qkv"}),
        ("peak-memory-bytes/largest", "peak-memory-bytes/largest", {}),
        ("pause-seconds/save-checkpoint", "pause-seconds/{reason}", {"reason": "save-checkpoint"}),
        ("node/12/gpu-watts", "node/{node}/{quantity}", {"node": "12", "quantity": "gpu-watts"}),
        (
            "fp8/layers.3/self_attention.proj/input/amax",
            "fp8/layers.{layer}/{tensor}/amax",
            {"layer": "3", "tensor": "self_attention.proj/input"},
        ),
    ],
)
def test_a_name_of_a_family_finds_its_entry(name: str, entry: str, fields: dict[str, str]) -> None:
    found = find(name)
    assert found is not None
    assert (found.series.name, found.fields) == (entry, fields)


def test_a_name_that_is_not_listed_is_a_series_of_dashboards_all_the_same() -> None:
    assert find("new/a") is None
    assert series_of({"event": "train", "iteration": 2, "new/a": 1.5}) == (2, {"new/a": 1.5})


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        (Column("loss {:.2f}"), 1.234, "loss 1.23"),
        (Column("loss {:.2f}"), None, "loss -"),
        (Column("loss {:.2f}"), "nan", "loss nan"),
        (Column("{name} {:.1f}"), None, "it -"),
        (Column("waits {:.0%}", minimum=0.05), 0.04, None),
        (Column("waits {:.0%}", minimum=0.05), None, None),
        (Column(lambda value: f"{value} left"), 2.0, "2.0 left"),
        (Column(lambda value: f"{value} left"), None, None),
    ],
)
def test_a_column_shows_a_value_or_that_it_is_withheld(column: Column, value: float | None, text: str | None) -> None:
    assert column.show("it", value) == text


def test_maps_over_layers_have_0_where_a_layer_has_no_finite_value() -> None:
    name: Callable[[int], str] = "fp8/layers.{}/self_attention.proj/input/amax".format
    values = {name(0): 2.0, name(2): float("inf"), "fp8/layers.1/self_attention.proj/input/error": 1.0, "lm loss": 3.0}
    assert layer_maps(values, 3) == {"fp8 map/self_attention.proj/input/amax": [2.0, 0.0, 0.0]}
