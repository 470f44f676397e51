"""Two launchers, as on two nodes: they meet, train one model, and end together when one rank fails."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.conftest import TRAIN_ITERS, Tiny
from tests.e2e.launch import PRETRAIN, Ended, run
from tests.e2e.test_failures import FAILS_ON_RANK_1, MOST_SECONDS

pytestmark = pytest.mark.slow


def two_nodes(directory: Path, script: Path = PRETRAIN) -> list[Ended]:
    """The README's multi-node line on two "nodes" of one rank each; they meet in a file, so no port is fixed."""
    meeting = (
        f"--rdzv-backend c10d --rdzv-id tiny --rdzv-endpoint {directory / 'rendezvous'} --rdzv-conf store_type=file"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command = [*launcher, *meeting.split(), "--local-addr", "localhost", script, "tiny.yaml"]
    with ThreadPoolExecutor(2) as pool:
        nodes = [pool.submit(run, command, directory) for _ in range(2)]
        return [node.result() for node in nodes]


def test_two_launchers_train_one_model(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write_config(tmp_path, tp=2)
    nodes = two_nodes(tmp_path)
    assert [node.code for node in nodes] == [0, 0], "\n".join(node.output for node in nodes)
    # One rank of all writes.
    assert sorted(f"iteration {TRAIN_ITERS}/" in node.stdout for node in nodes) == [False, True]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["event"] for line in lines].count("train") == TRAIN_ITERS


def test_a_failure_on_one_node_ends_both(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write_config(tmp_path, tp=2)
    script = tmp_path / "fails_on_rank_1.py"
    script.write_text(FAILS_ON_RANK_1, encoding="utf-8")
    nodes = two_nodes(tmp_path, script)
    everything = "\n".join(node.output for node in nodes)
    assert [node.code for node in nodes] == [1, 1], everything
    failed_at = float((tmp_path / "failed_at").read_text(encoding="utf-8"))
    assert max(node.ended_at for node in nodes) - failed_at < MOST_SECONDS, everything
    (cause,) = [node for node in nodes if "rank 1 failed" in node.stderr]
    last = cause.stderr[cause.stderr.rindex("Traceback (most recent call last)") :]
    assert "ValueError: the third step was one too many" in last, everything
