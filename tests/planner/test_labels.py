"""Labels are for display alone: other words change no number."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.config.check import DataReport
from megatron_fp8.config.load import load_config
from megatron_fp8.planner import plan_report
from megatron_fp8.planner.gpus import GPUS
from megatron_fp8.planner.plan import make_plan, resolve_layout, resolve_sizes
from megatron_fp8.planner.plan_report import plan_json
from megatron_fp8.planner.search import search
from megatron_fp8.precision import chart_labels
from megatron_fp8.precision.chart import precision_chart
from megatron_fp8.precision.chart_labels import chart_records, format_chart
from megatron_fp8.precision.chart_rows import Collective, Group, Tensor

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
E4M3_BLOCKS = ["precision.fp8_recipe=blockwise", "precision.fp8_format=e4m3"]
LAYOUTS = (
    [],
    ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
    [
        "parallel.pipeline_model_parallel_size=2",
        "precision.mode=fp8",
        "precision.fp8_recipe=blockwise",
        "precision.fp8_format=e4m3",
    ],
)
SIZES = ["model.vocab_size=32000", "training.micro_batch_size=1", "training.global_batch_size=512"]
PARAMETERS_IN_FP8 = ["precision.mode=fp8", "precision.fp8_param_gather=true"]
# Keys of a plan whose values are text.
WORDS_OF_A_PLAN = ("name", "format", "gpu", "group", "withheld", "deterministic")


def loaded(preset: Path, overrides: list[str]) -> tuple[Any, Any]:
    config = load_config(preset, [*overrides, *SIZES])
    found, vocab_size = resolve_sizes(config, lambda _: DataReport(None, ()))
    return found, resolve_layout(found, 128, vocab_size)


def numbers(value: Any) -> Any:
    """A plan's JSON without its words."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items() if key not in WORDS_OF_A_PLAN}
    return [numbers(item) for item in value] if isinstance(value, list) else value


def all_numbers() -> list[Any]:
    found = []
    for preset in PRESETS:
        for overrides in (*LAYOUTS, PARAMETERS_IN_FP8):
            run, layout = loaded(preset, overrides)
            plan = make_plan(run.config, layout, GPUS["h100-80g"])
            rows = precision_chart(run.config, layout)
            sizes = [{k: v for k, v in record.items() if "label" not in k} for record in chart_records(rows)]
            found.append([preset.name, numbers(plan_json(plan)), sizes])
    return found


def rename_all_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    names = random.Random(1)
    for module, table in ((chart_labels, "LABELS"), (plan_report, "MEMORY_LABELS")):
        renamed = {member: f"w{names.randrange(10**8):08}" for member in getattr(module, table)}
        monkeypatch.setattr(module, table, renamed)


def test_renaming_every_label_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    before = json.dumps(all_numbers())
    run, layout = loaded(PRESETS[0], [])
    text = format_chart(precision_chart(run.config, layout))
    rename_all_labels(monkeypatch)
    assert json.dumps(all_numbers()) == before
    assert format_chart(precision_chart(run.config, layout)) != text


def test_renaming_a_label_changes_no_layout_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = loaded(ROOT / "configs/llama_8b_fp8.yaml", [])
    before = search(run, 16, 32000, GPUS["h100-80g"])
    rename_all_labels(monkeypatch)
    assert search(run, 16, 32000, GPUS["h100-80g"]) == before


def test_gathered_parameters_outside_fp8_keep_their_bytes_whatever_they_are_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All parameters were once counted for this row when its text had other words."""
    run, layout = loaded(ROOT / "configs/llama_8b_fp8.yaml", PARAMETERS_IN_FP8)
    before = make_plan(run.config, layout, GPUS["h100-80g"])
    monkeypatch.setitem(chart_labels.LABELS, Tensor.OTHER_PARAMETERS, "all the rest")
    after = make_plan(run.config, layout, GPUS["h100-80g"])
    assert after.traffic == before.traffic
    (gathered,) = (item for item in after.traffic[0] if item.row.tensor is Tensor.OTHER_PARAMETERS)
    assert (gathered.row.group, gathered.row.collective) == (Group.DP, Collective.ALL_GATHER)
    assert gathered.row.size == 2 * after.rank_parameters[0].others


def test_only_what_makes_text_reads_labels() -> None:
    """Whoever imports the tables, or functions that make text of them, shows text and computes nothing from it."""
    texts = {
        "commands/precision_chart.py",
        "planner/plan_report.py",
        "planner/search.py",
        "train/start_record.py",
    }
    readers = set()
    for file in (ROOT / "megatron_fp8").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names}
                if node.module == chart_labels.__name__ or names & {"MEMORY_LABELS", "chart_labels"}:
                    readers.add(str(file.relative_to(ROOT / "megatron_fp8")))
    assert readers == texts
