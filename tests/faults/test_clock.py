"""The wall clock may jump: durations come from monotonic clocks, and only time stamps from the wall clock."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from tests.checkpoint.training import checkpoint_config, train_on_this_rank
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
WALL_CLOCKS = {"time", "time_ns", "localtime", "gmtime", "now", "utcnow", "today"}
# Where the wall clock may be read, and for what: a moment that people or other programs are told.
TIME_STAMPS = {
    "megatron_fp8/commands/rank_zero_output.py": "the launcher's error file",
    "megatron_fp8/report/record.py": "when a record was made",
    "megatron_fp8/report/wandb_sink.py": "records of others without a time",
    "megatron_fp8/report/views.py": "since when events are alerts",
    "megatron_fp8/report/tensorboard_sink.py": "TensorBoard's events",
    "megatron_fp8/data/index_cache.py": "the age of a directory, whose time is the file system's",
    "megatron_fp8/train/checkpointing.py": "when a checkpoint was written",
    "tools/benchmarks/speed/report.py": "when figures were measured",
    "megatron_fp8/hf/import_model.py": "when a checkpoint was written",
    "megatron_fp8/report/html/tables.py": "the day of a record's time",
    "megatron_fp8/monitors/watchdog.py": "since when a rank stands still",
}


def wall_clock_reads(tree: ast.AST) -> list[int]:
    """Lines that read the wall clock: `time.time()`, `datetime.now()` and their like."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in WALL_CLOCKS
        and isinstance(node.func.value, (ast.Name, ast.Attribute))
        and ast.unparse(node.func.value) in ("time", "datetime", "datetime.datetime", "date", "datetime.date")
    ]


def test_the_wall_clock_is_read_for_time_stamps_only() -> None:
    read = {}
    for path in [*(ROOT / "megatron_fp8").rglob("*.py"), *(ROOT / "tools").rglob("*.py"), ROOT / "pretrain.py"]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines = wall_clock_reads(tree)
        imported = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and node.module == "time"
            and WALL_CLOCKS & {alias.name for alias in node.names}
        ]
        if lines or imported:
            read[str(path.relative_to(ROOT))] = lines + imported
    unknown = {path: lines for path, lines in read.items() if path not in TIME_STAMPS}
    assert not unknown, (
        "durations are taken from time.monotonic() or time.perf_counter(); a time stamp has its place above"
    )
    assert set(TIME_STAMPS) == set(read), "no longer read there: take it off the list"


def test_the_search_finds_what_it_should() -> None:
    text = "import time\nstarted = time.time()\ntime.monotonic()\nx = datetime.datetime.now()\nf(time.time_ns())\n"
    assert wall_clock_reads(ast.parse(text)) == [2, 4, 5]


def jump(parts: Any) -> None:
    """The wall clock goes back by a day after the second reading, and on by a week after the fourth."""
    import time

    real, readings = time.time, []

    def jumping() -> float:
        readings.append(0)
        shift = 0.0 if len(readings) < 2 else -86_400.0 if len(readings) < 4 else 7 * 86_400.0
        return real() + shift

    time.time = jumping


def train_through_jumps(config: Any) -> list[dict[str, Any]]:
    """With a watchdog, as a job has one."""
    import torch

    from megatron_fp8.monitors.watchdog import Limits, Watchdog

    watchdogs = []

    def begin(parts: Any) -> None:
        store = torch.distributed.distributed_c10d._get_default_store()
        watchdog = Watchdog(parts.heartbeat, store, 0, 1, Limits(60.0, None), lambda: True, lambda hang: None)
        watchdogs.append(watchdog.__enter__())
        jump(parts)

    records = train_on_this_rank(config, before=begin).records
    watchdogs[0].__exit__(None, None, None)
    return records


def test_a_run_whose_clock_jumps_is_as_any_other() -> None:
    """`exit_duration_in_mins` and the watchdog would end it if they believed the wall clock."""
    config = checkpoint_config(
        training={"train_iters": 8, "eval_iters": 0},
        checkpoint={"save": False, "exit_duration_in_mins": 600.0},
        logging={"log_interval": 1},
    )
    (records,) = run_on_ranks(1, train_through_jumps, config)
    train = [record for record in records if record["event"] == "train"]
    assert [record["iteration"] for record in train] == list(range(1, 9))
    stamps = [float(record["time"]) for record in records]
    assert max(stamps) - min(stamps) > 7 * 86_400, "the clock did jump"
    for record in train:
        assert 0 < record["iteration-time"] < 600
        assert record["tokens-per-second"] > 0
        assert 0 <= record["seconds-left"] < 6000
    (end,) = (record for record in records if record["event"] == "end")
    assert end["stopped"] is None
    assert 0 < end["seconds"] < 600
