"""A run of two FP8 tensor-parallel ranks under torchrun: what it leaves, what a second start does, how it repeats."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.commands import dashboard
from megatron_fp8.config.load import load_config
from megatron_fp8.report.series import Section
from megatron_fp8.report.series_registry import OTHER_FP8, SERIES_EVENTS, find, named_values
from tests.e2e.conftest import TRAIN_ITERS, Tiny
from tests.e2e.launch import ROOT, Ended, pretrain, torchrun

NUM_RANKS = 2
# The documented series of each kind of record.
SERIES = {
    "start": {
        *("run directory", "device", "emulated", "precision", "layout", "parameters", "mfu", "versions", "code"),
        "precision chart",
    },
    "ready": {"seconds-to-first-step"},
    "startup": {
        *("iteration", "seconds", "config-seconds", "import-seconds", "environment-seconds", "model-seconds"),
        *("data-seconds", "evaluation-seconds", "first-step-seconds"),
    },
    "train": {
        "iteration",
        "lm loss",
        "grad-norm",
        "learning-rate",
        "iteration-time",
        "tokens-per-second",
        "seconds-left",
        "consumed-samples",
        "consumed-tokens",
        "data-wait-seconds",
        "data-wait-share",
        "peak-memory-bytes",
        "peak-memory-bytes/largest",
        *("batch-size", "tokens-per-second-per-gpu", "throughput", "mfu", "pipeline-bubble", "pause-seconds"),
        *("compute-time/fastest-rank", "compute-time/slowest-rank", "slowest-rank"),
        *("batch-generator-time", "forward-backward-time", "all-grads-sync-time", "optimizer-time", "other-time"),
        *("forward-backward-time/forward", "forward-backward-time/backward", "forward-backward-time/waiting"),
        *("optimizer-time/params-all-gather", "optimizer-time/fp8-scale-update"),
        *("pause-seconds/evaluate", "pause-seconds/save-checkpoint"),
        *("node/0/cpu-percent", "node/0/memory-used-bytes", "node/0/disk-free-bytes"),
    },
    "slow-rank": {"iteration", "rank", "seconds"},
    "fp8": {"iteration"},
    "norms": {"iteration", "grad-norm/qkv", "grad-norm/layers.1/fc2", "params-norm", "params-norm/layers.0/norms"},
    "validation": {"iteration", "lm loss validation", "lm loss validation ppl", "consumed-tokens"},
    "checkpoint": {"iteration", "path", "bytes", "seconds", "hold-up-seconds", "removed"},
    "end": {"iteration", "lm loss validation at start", "lm loss validation", "seconds", "stopped"},
}
TRAIN_LINE = re.compile(
    r"iteration +(\d+)/6 \| lm loss (\d+\.\d{4}) \| grad-norm (\d+\.\d{3}) \| learning-rate (\d\.\d\de[-+]\d\d)"
    r" \| tokens/s ([\d,]+)(?: \| waits for data \d+%)? \| time left (.+)"
)
VALIDATION_LINE = re.compile(r"iteration (\d+)/6 \| lm loss validation (\d+\.\d{4})")


@dataclass(frozen=True)
class Finished:
    """A run that ended, the directory it was started in and its config file."""

    ended: Ended
    start_directory: Path
    config_path: Path

    @property
    def directory(self) -> Path:
        return self.start_directory / "runs" / "tiny"


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Every line as strict JSON: no NaN, no half line."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def of_kind(records: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [record for record in records if record["event"] == event]


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("training")
    config_path = tiny.write_config(directory, tp=NUM_RANKS)
    ended = torchrun(NUM_RANKS, "tiny.yaml", cwd=directory)
    assert ended.code == 0, ended.output
    return Finished(ended, directory, config_path)


def test_the_run_directory_holds_config_metrics_and_console_log(finished: Finished) -> None:
    files = [name for name in content(finished.directory) if not name.startswith("checkpoints/")]
    assert sorted(files) == [
        ".lock",
        "config.yaml",
        "console.log",
        "metrics.jsonl",
        "precision_chart.txt",
        "report.html",
    ]
    checkpoints = finished.directory / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        f"iter_{TRAIN_ITERS:07d}",
        "latest_checkpointed_iteration.txt",
    ]
    assert [path.name for path in (finished.start_directory / "runs").iterdir()] == ["tiny"]


def test_the_start_fits_one_screen(finished: Finished) -> None:
    start, _, after = finished.ended.stdout.partition("\niteration 1/")
    lines = [*start.splitlines(), *finished.ended.stderr.splitlines()]
    assert after.count("\nstartup took ") == 1
    assert 10 < len(lines) <= 24, lines
    assert [line for line in lines if len(line) > 120] == []
    # The chart is a file, and each fact is there once.
    assert "precision chart: runs/tiny/precision_chart.txt" in lines
    assert "wgrad" not in start
    assert [line for line in lines if lines.count(line) > 1] == []
    assert start.count(" linear layers in fp8") == start.count("megatron-fp8 ") == 1


def test_the_written_config_reads_back_equal(finished: Finished) -> None:
    written = load_config(finished.directory / "config.yaml").config
    assert written == load_config(finished.config_path).config


def test_every_series_is_documented(finished: Finished) -> None:
    text = (ROOT / "docs" / "dashboards.md").read_text(encoding="utf-8")
    quoted = " ".join(re.findall(r"`([^`]+)`", re.sub("```.*?```", "", text, flags=re.DOTALL)))
    named = {"seconds-left", "time", *re.findall(r"[a-z0-9-]+", quoted)}
    for record in of_kind(read_metrics(finished.directory), "train"):
        for series in record.keys() - {"event", "iteration"}:
            assert {part for part in re.split("[ /]", series) if not part.isdecimal()} <= named, series


def test_metrics_hold_the_documented_series(finished: Finished) -> None:
    records = read_metrics(finished.directory)
    for record in records:
        assert record.keys() - {"event"} >= SERIES[record["event"]], record
    steps = of_kind(records, "train")
    assert [step["iteration"] for step in steps] == list(range(1, TRAIN_ITERS + 1))
    assert [step["consumed-samples"] for step in steps] == [4 * step["iteration"] for step in steps]
    assert [step["consumed-tokens"] for step in steps] == [4 * 32 * step["iteration"] for step in steps]
    assert [record["iteration"] for record in of_kind(records, "validation")] == [0, 3, 6]
    at_intervals = ("train", "validation", "fp8", "norms")
    assert [record["event"] for record in records if record["event"] not in at_intervals] == [
        "start",
        "ready",
        "startup",
        "checkpoint",
        "end",
    ]
    # Scales of single tensors stand beside each training record.
    assert [record["iteration"] for record in of_kind(records, "fp8")] == [step["iteration"] for step in steps]


def test_metrics_are_those_of_a_run_that_learns(finished: Finished) -> None:
    records = read_metrics(finished.directory)
    steps = of_kind(records, "train")
    # Warm-up over two steps from 0, then a cosine that has not come to its end at the last step.
    rates = [step["learning-rate"] for step in steps]
    assert rates[0] < rates[1] < rates[2] == pytest.approx(0.01)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert all(step["grad-norm"] > 0 and step["peak-memory-bytes"] > 2**20 for step in steps)
    for step in steps:
        assert step["tokens-per-second"] == pytest.approx(4 * 32 / step["iteration-time"])
    validation = [record["lm loss validation"] for record in of_kind(records, "validation")]
    (end,) = of_kind(records, "end")
    assert end["lm loss validation at start"] == validation[0] == pytest.approx(math.log(300), abs=0.3)
    assert end["lm loss validation"] == validation[-1] < validation[0] - 0.5


def test_every_series_is_in_the_registry_and_every_panel_has_one(finished: Finished) -> None:
    records = [record for record in read_metrics(finished.directory) if record["event"] in SERIES_EVENTS]
    recorded = {name for record in records for name, _ in named_values(record)}
    unlisted = {name for name in recorded if (found := find(name)) is None or found.series is OTHER_FP8}
    # Of a checkpoint what is no number.
    assert unlisted == {"checkpoint/path", "checkpoint/removed"}
    panels = {name for section in Section for names in dashboard.panels(section).values() for name in names}
    assert {name for name in panels if " map/" not in name} - recorded == {
        *("loss-scale", "fp8/fallen-back-layers", "pipeline-bubble/measured")
    }


def test_the_console_is_plain_lines_of_one_rank(finished: Finished) -> None:
    lines = finished.ended.stdout.splitlines()
    assert "\x1b" not in finished.ended.stdout + finished.ended.stderr
    assert "\r" not in finished.ended.stdout
    steps = [match for line in lines if (match := TRAIN_LINE.fullmatch(line))]
    records = of_kind(read_metrics(finished.directory), "train")
    assert [int(step[1]) for step in steps] == [record["iteration"] for record in records]
    assert [float(step[2]) for step in steps] == pytest.approx([record["lm loss"] for record in records], abs=1e-4)
    validations = [match for line in lines if (match := VALIDATION_LINE.fullmatch(line))]
    assert [int(validation[1]) for validation in validations] == [0, 3, 6]
    assert lines == (finished.directory / "console.log").read_text(encoding="utf-8").splitlines()


def test_nothing_but_our_own_warnings_reaches_standard_error(finished: Finished) -> None:
    """What the libraries underneath say at every start, no user can change."""
    lines = finished.ended.stderr.splitlines()
    assert [line for line in lines if line and not line.startswith(("warning: ", "    "))] == []


def test_the_console_says_what_ran_and_how_it_ended(finished: Finished) -> None:
    lines = finished.ended.stdout.splitlines()
    head = dict(line.split(": ", 1) for line in lines if re.match(r"[a-z ]+: ", line))
    assert head["run directory"] == "runs/tiny"
    assert "fp8 delayed hybrid, history 4; 8 of 8 linear layers in fp8" in head["precision"]
    assert "withheld" in head["mfu"]
    assert "tp 2 x pp 1 x dp 1" in head["layout"]
    assert head["precision chart"] == "runs/tiny/precision_chart.txt"
    assert "TP all-gather, forward" in (finished.directory / "precision_chart.txt").read_text(encoding="utf-8")
    # What was said once is not said again, and all of it fits one screen with the first step.
    assert sum("emulated" in line for line in lines) <= 2
    first_step = next(place for place, line in enumerate(lines) if TRAIN_LINE.fullmatch(line))
    assert sum(-(-max(len(line), 1) // 80) for line in lines[: first_step + 1]) <= 24
    assert re.fullmatch(
        r"finished 6 iterations in .+ \| lm loss validation \d\.\d{4} -> \d\.\d{4} \(-\d\.\d{4} nats\) \| runs/tiny",
        lines[-1],
    )


def test_the_same_name_is_refused_and_nothing_changed(finished: Finished) -> None:
    before = content(finished.start_directory)
    ended = torchrun(NUM_RANKS, "tiny.yaml", cwd=finished.start_directory)
    # The launcher ends with 1 whatever its ranks end with, and says what that was.
    assert ended.code == 1
    assert re.search(r"rank +: 0 .*\n +exitcode +: 2 ", ended.stderr), ended.output
    assert "the run directory runs/tiny exists, and nothing in it is overwritten" in ended.stderr
    assert ended.stderr.count("run.name=tiny-2") == 1
    assert ended.stdout == ""
    one_rank = pretrain("tiny.yaml", cwd=finished.start_directory, environment={"RANK": "0", "WORLD_SIZE": "2"})
    assert one_rank.code == 2, one_rank.output
    assert content(finished.start_directory) == before


def test_the_written_config_repeats_the_run_bit_by_bit(finished: Finished) -> None:
    ended = torchrun(NUM_RANKS, "runs/tiny/config.yaml", "run.new_name_if_exists=true", cwd=finished.start_directory)
    assert ended.code == 0, ended.output
    first = read_metrics(finished.directory)
    second = read_metrics(finished.start_directory / "runs" / "tiny-2")
    for event, names in (("train", ("iteration", "lm loss", "grad-norm")), ("validation", ("lm loss validation",))):
        for name in names:
            assert [record[name] for record in of_kind(second, event)] == [
                record[name] for record in of_kind(first, event)
            ]
