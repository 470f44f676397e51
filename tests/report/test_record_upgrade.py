"""Records of older versions are read in today's form: a run's record from before lists and tables were values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.report.console import format_record
from megatron_fp8.report.html import render
from megatron_fp8.report.html.tables import chart
from megatron_fp8.report.record import read_records
from megatron_fp8.report.record_upgrade import upgraded
from megatron_fp8.report.run_reader import read_run

# Written by the last version of the old form; layers and steps that say nothing new are cut out.
OLD_RUN = Path(__file__).parent / "old_run"


def test_the_record_of_an_old_run_has_lists_and_numbers() -> None:
    records = list(read_records(OLD_RUN / "metrics.jsonl"))
    by_event = {record["event"]: record for record in records}
    assert by_event["checkpoint"]["removed"] == [2]
    assert by_event["fp8-check"]["fallen-back-layers"] == []
    assert by_event["profile"]["ranks"] == [0]
    assert by_event["resume"]["notes"] == []
    start = by_event["start"]
    assert start["versions"]["torch"] == "2.13.0"
    assert start["layout"] == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 1,
        "num_microbatches": 2,
        "micro_batch_size": 2,
    }
    assert start["parameters"] == 139_584
    assert start["code"] == {"version": "0.1.0", "commit": "26d9b1f", "changes": True}
    assert start["precision"]["description"].startswith("fp8 delayed hybrid, history 4, emulated; 8 of 8")
    rows = start["precision chart"]
    assert rows[0] == {
        "section_label": "GEMM operands",
        "label": "fprop input",
        "format_label": "e4m3, fp32 scale per tensor",
        "size": 1.0,
        "per_label": "element",
    }
    assert {row["section_label"] for row in rows} >= {"communication", "parameters", "kept for backward", "logits"}


def test_an_old_run_has_a_report_and_lines() -> None:
    run = read_run(OLD_RUN)
    assert [section for section, _ in chart(run)][:2] == ["GEMM operands", "communication"]
    page = render([run])
    assert "fprop input" in page
    assert "Up to iteration 2, rank 0" in page
    lines = [format_record(event, 6) for event in run.events]
    assert any(line.endswith("removed 2") for line in lines)
    assert "layout: tp 2 x pp 1 x dp 1, 2 micro-batches of 2" in lines[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"event": "hang", "ranks": "3 11"}, {"ranks": [3, 11]}),
        ({"event": "replica", "ranks": "1 2", "hosts": "a b"}, {"ranks": [1, 2], "hosts": ["a", "b"]}),
        ({"event": "rewind", "notes": "one; two"}, {"notes": ["one", "two"]}),
        ({"event": "resume", "notes": ""}, {"notes": []}),
        ({"event": "fp8-check", "fallen-back-layers": "0 7"}, {"fallen-back-layers": [0, 7]}),
        ({"event": "no-loss", "of": "the iterations since the last record"}, {"of": "training", "sets": []}),
        ({"event": "no-loss", "of": "the validation samples"}, {"of": "validation", "sets": []}),
        ({"event": "no-loss", "of": "the validation samples a, b"}, {"of": "validation", "sets": ["a", "b"]}),
        # What no version wrote stays as it is.
        ({"event": "hang", "ranks": "all"}, {"ranks": "all"}),
        ({"event": "start", "layout": "odd", "parameters": "many"}, {"layout": "odd", "parameters": "many"}),
    ],
)
def test_each_list_is_upgraded_and_an_upgraded_record_stays(old: dict[str, Any], new: dict[str, Any]) -> None:
    record = upgraded({**old, "iteration": 3})
    assert record == {**old, **new, "iteration": 3}
    assert upgraded(record) == record
