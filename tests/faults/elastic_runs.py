"""Runs under torchrun's elastic restart whose ranks are signalled by a plan, held against undisturbed ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fp8.checkpoint.difference import differences
from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.checkpoint.manifest import find_corruption
from megatron_fp8.report.record import METRICS, read_records
from tests.e2e.conftest import Tiny
from tests.e2e.launch import PRETRAIN, Ended, run
from tests.e2e.test_resume import events, series
from tests.faults import killed_pretrain

NUM_RANKS = 2
OVERRIDES = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1", "checkpoint.save_interval=2")
# Moments that tests of kills and of other signals share.
STEP, EVALUATION = ("train/step.py", "train", "call"), ("train/step.py", "evaluate", "call")
BUILT = ("train/setup.py", "build_parts", "return")
SAVE_BEGINS, SAVE_GOES_ON = ("checkpoint/save.py", "start", "call"), ("checkpoint/save.py", "start", "return")
COMMIT = ("checkpoint/directory.py", "commit", "call")
# Of one start of two ranks, on a machine that has much else to do.
MOST_SECONDS_OF_A_START = 300

Signalled = dict[str, Any]


def signalled(
    file: str, function: str, event: str, name: str = "SIGKILL", *, rank: int = 0, count: int = 1, **more: Any
) -> Signalled:
    """An entry of a plan: when `function` of `file` is called, or returns, for the `count`-th time of a start.

    `times`: how often the signal is sent. `in_writer`: to the process that writes a checkpoint, where it is called.
    `writer_sticks`: that process does not get on when it has written. `seconds`: so much later. `early`: before the
    libraries are imported.
    """
    entry = {"file": file, "function": function, "event": event, "signal": name, "rank": rank, "count": count}
    usual = {"times": 1, "in_writer": False, "writer_sticks": False, "seconds": 0.0, "early": False}
    return {**entry, **usual, **more}


def elastic_run(
    directory: Path,
    *arguments: str,
    script: str | Path = PRETRAIN,
    restarts: int = 0,
    cold: bool = False,
    **environment: str,
) -> Ended:
    """`NUM_RANKS` ranks in `directory` under torchrun with so many restarts.

    `cold`: under its command line, so that each rank imports the libraries anew; else as `warm_torchrun` says.
    """
    command = [*(cold_launcher(restarts) if cold else warm_launcher(restarts)), script, "tiny.yaml", *OVERRIDES]
    return run([*command, *arguments], directory, environment, timeout_seconds=MOST_SECONDS_OF_A_START * (restarts + 1))


def warm_launcher(restarts: int) -> list[str]:
    """The beginning of a command line: a launcher whose ranks are forked from it."""
    return [sys.executable, "-m", "tests.faults.warm_torchrun", str(NUM_RANKS), str(restarts)]


def cold_launcher(restarts: int) -> list[str]:
    """The same: torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    return [*torchrun, "--max-restarts", str(restarts), "--monitor-interval", "0.1"]


def check_plan(tiny: Tiny, directory: Path, plan: list[Signalled], *arguments: str, cold: bool = False) -> Ended:
    """The run, started again after each signal of the plan, ends as one that was not disturbed."""
    tiny.write_config(directory, tp=NUM_RANKS)
    straight = elastic_run(directory, "run.name=straight", *arguments, cold=cold)
    assert straight.code == 0, straight.output
    files = {"KILL_PLAN": directory / "plan", "KILLED": directory / "killed"}
    files["KILL_PLAN"].write_text(json.dumps(plan), encoding="utf-8")
    script, environment = Path(killed_pretrain.__file__), {name: str(path) for name, path in files.items()}
    ended = elastic_run(
        directory, "--resume=auto", *arguments, script=script, restarts=len(plan), cold=cold, **environment
    )
    sent = [json.loads(line) for line in files["KILLED"].read_text(encoding="utf-8").splitlines()]
    assert [_without_children(entry) for entry in sent] == plan, ended.output
    assert ended.code == 0, ended.output
    assert killed_pretrain.orphans(files["KILLED"]) == []
    run_directory = directory / "runs" / "tiny"
    assert_same_end(run_directory, directory / "runs" / "straight")
    assert len(events(run_directory, "end")) == 1
    assert not events(run_directory, "failure")
    return ended


def assert_same_end(directory: Path, straight: Path) -> None:
    """Every record of steps once, with the same values; the same tensors at the end; nothing left lying about."""
    assert series(directory) == series(straight)
    runs = [CheckpointDirectory(path / "checkpoints") for path in (directory, straight)]
    latest = runs[1].latest()
    assert latest is not None
    assert runs[0].latest() == latest
    tensors = list(differences(runs[0].path(latest), runs[1].path(latest)))
    assert len(tensors) > 40
    assert [tensor for tensor in tensors if tensor.kind != "equal"] == []
    for iteration in runs[0].iterations():
        assert list(find_corruption(runs[0].path(iteration))) == []
    assert list(runs[0].root.glob(".iter*")) == []
    # No start took another name.
    assert sorted(path.name for path in directory.parent.iterdir()) == sorted([directory.name, straight.name])


def last_iteration(run_directory: Path) -> int:
    """Of the last step that is recorded; 0 before there is one."""
    path = run_directory / METRICS
    records = list(read_records(path)) if path.exists() else []
    return max((int(str(record["iteration"])) for record in records if record["event"] == "train"), default=0)


def _without_children(entry: Mapping[str, Any]) -> Signalled:
    return {name: value for name, value in entry.items() if name != "children"}
