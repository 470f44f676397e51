"""Megatron Core's own engine on gloo: DDP, distributed optimizer, clipping, schedules, tensor parallel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("megatron_worker.py")

DEFAULTS = {
    "tp": 1, "pp": 1, "vpp": None, "sp": False, "dtype": "float32", "distributed_optimizer": False,
    "overlap": False, "tied": False, "dropout": 0.0, "recompute": False,
}  # fmt: skip
ONE_RANK = {
    "plain": {},
    "tied": {"tied": True},
    "bf16": {"dtype": "bfloat16"},
    "dropout": {"dropout": 0.3},
    "dropout, recomputed": {"dropout": 0.3, "recompute": True},
}
# Two ranks: the layout and the one-rank run whose losses and gradient norms it must reproduce.
TWO_RANKS: dict[str, tuple[dict[str, Any], str]] = {
    "dp2": ({}, "plain"),
    "dp2, distributed optimizer": ({"distributed_optimizer": True}, "plain"),
    "dp2, distributed optimizer, overlapped": ({"distributed_optimizer": True, "overlap": True}, "plain"),
    "dp2, bf16, distributed optimizer": ({"distributed_optimizer": True, "dtype": "bfloat16"}, "bf16"),
    "pp2": ({"pp": 2}, "plain"),
    "pp2, tied": ({"pp": 2, "tied": True}, "tied"),
    "pp2 interleaved": ({"pp": 2, "vpp": 2}, "plain"),
    "tp2": ({"tp": 2}, "plain"),
    "tp2, sequence parallel": ({"tp": 2, "sp": True}, "plain"),
}


def start(folder: Path, world: int, layouts: dict[str, dict[str, Any]]) -> list[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "LOCAL_WORLD_SIZE": str(world),
    }
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    text = json.dumps({name: DEFAULTS | layout for name, layout in layouts.items()})
    store, result = str(folder / f"store{world}"), str(folder / f"result{world}")
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(world), store, result, text],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[list[float]]]]:
    """By number of ranks and name of the layout: [loss, grad norm] of each step."""
    folder = tmp_path_factory.mktemp("megatron")
    for world, layouts in ((1, ONE_RANK), (2, {name: layout for name, (layout, _) in TWO_RANKS.items()})):
        processes = start(folder, world, layouts)
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        for process, output in zip(processes, outputs, strict=True):
            assert process.returncode == 0, output[-6000:]
    return {world: json.loads((folder / f"result{world}").read_text()) for world in (1, 2)}


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_train_what_one_rank_trains(curves: dict[int, Any], name: str) -> None:
    layout, reference = TWO_RANKS[name]
    # BF16 rounds partial sums at other places; FP32 differs by the order of additions only.
    loss_tolerance, norm_tolerance = (2e-3, 2e-2) if layout.get("dtype") else (1e-5, 1e-4)
    for (loss, norm), (expected, expected_norm) in zip(curves[2][name], curves[1][reference], strict=True):
        assert loss == pytest.approx(expected, rel=loss_tolerance)
        assert norm == pytest.approx(expected_norm, rel=norm_tolerance)


def test_it_trains_and_layout_matters(curves: dict[int, Any]) -> None:
    losses = [loss for loss, _ in curves[1]["plain"]]
    assert len(set(losses)) == len(losses)
    assert curves[1]["plain"] != curves[1]["tied"]


def test_recompute_draws_the_same_dropout(curves: dict[int, Any]) -> None:
    assert curves[1]["dropout"] != curves[1]["plain"]
    assert curves[1]["dropout, recomputed"] == curves[1]["dropout"]
