"""How much a reader has to open: the files that a start and a step go through, the stand-in's aside."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.e2e.conftest import Tiny
from tests.e2e.launch import ROOT, run

MAX_FILES_OF_A_START = 110
MAX_FILES_OF_A_STEP, MAX_LINES_OF_A_STEP = 30, 5000
# What a reader of the step itself can leave for later.
WITHOUT = (
    "training.eval_iters=0",
    "checkpoint.save=false",
    "logging.norms_interval=0",
    "faults.spike=off",
    "faults.replica_check_interval=0",
)


def test_a_start_and_a_step_are_short_ways(tiny: Tiny, tmp_path: Path) -> None:
    """One rank, FP8, a record each step; a step is read from the loop to its record."""
    config, output = tiny.write_config(tmp_path), tmp_path / "entered.json"
    program = [sys.executable, "-m", "tests.e2e.traced_pretrain", str(output), str(config), f"run.root={tmp_path}"]
    ended = run([*program, *WITHOUT, "training.train_iters=3"], cwd=ROOT)
    assert ended.code == 0, ended.output
    entered = {
        phase: [name for name in names if not name.startswith("cpu/")]
        for phase, names in json.loads(output.read_text(encoding="utf-8")).items()
    }
    assert {"commands/train.py", "train/setup.py", "config/load.py"} <= set(entered["start"])
    assert {"train/step.py", "precision/manager.py", "report/record.py"} <= set(entered["step"])
    assert len(entered["start"]) <= MAX_FILES_OF_A_START, entered["start"]
    assert len(entered["step"]) <= MAX_FILES_OF_A_STEP, entered["step"]
    texts = [(ROOT / "megatron_fp8" / name).read_text(encoding="utf-8") for name in entered["step"]]
    assert sum(len(text.splitlines()) for text in texts) <= MAX_LINES_OF_A_STEP
