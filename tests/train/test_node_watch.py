"""What a job says about its nodes: numbers of this machine, one set a node, and sensors that fail stop nothing."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil
import pytest
import torch

from megatron_fp8 import device as devices
from megatron_fp8.device import Device
from megatron_fp8.monitors.node import NodeMonitor, NodeReading, node_series
from tests.checkpoint.training import checkpoint_config, train_on_this_rank
from tests.ranks import run_on_ranks

HOST = {"cpu-percent", "load-average", "memory-used-bytes", "memory-available-bytes", "disk-free-bytes"}
GPUS = {"gpu-busy-percent", "gpu-celsius", "gpu-watts", "gpu-megahertz"}


def test_a_node_is_read_by_its_first_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.prepare()
    monkeypatch.setenv("LOCAL_RANK", "0")
    # A directory that is yet to be made lies on the disk of the one above it.
    series = node_series([NodeMonitor(device, tmp_path / "not" / "made").read()])
    assert set(series) == {f"node/0/{name}" for name in HOST}
    disk = os.statvfs(tmp_path)
    assert series["node/0/disk-free-bytes"] == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.1)
    total = psutil.virtual_memory().total
    assert 0 < series["node/0/memory-used-bytes"] < total
    assert 0 < series["node/0/memory-available-bytes"] < total
    assert 0 <= series["node/0/cpu-percent"] <= 100
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert node_series([NodeMonitor(device, tmp_path).read()]) == {}


def gpus(monkeypatch: pytest.MonkeyPatch, **sensors: object) -> Device:
    """A node of two GPUs with these sensors."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, sensor in sensors.items():
        monkeypatch.setattr(torch.cuda, name, sensor)
    return Device(torch.device("cuda", 0), False, "nccl", "two GPUs")


def test_gpus_of_a_node_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    device = gpus(
        monkeypatch,
        utilization=lambda gpu: (90, 100)[gpu],
        temperature=lambda gpu: (70, 65)[gpu],
        power_draw=lambda gpu: (650_000, 700_500)[gpu],
        clock_rate=lambda gpu: (1980, 1200)[gpu],
    )
    series = node_series([NodeReading(), NodeMonitor(device, tmp_path).read()])
    assert set(series) == {f"node/1/{name}" for name in HOST | GPUS}
    assert {name: series[f"node/1/{name}"] for name in GPUS} == {
        "gpu-busy-percent": 95,
        "gpu-celsius": 70,
        "gpu-watts": 1350.5,
        "gpu-megahertz": 1200,
    }


def test_sensors_that_fail_are_told_once_and_leave_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")

    def fail(gpu: int) -> float:
        raise RuntimeError("cuda driver can't be loaded, is cuda enabled?")

    watch = NodeMonitor(gpus(monkeypatch, utilization=fail), tmp_path)
    for _ in range(3):
        assert set(node_series([watch.read()])) == {f"node/0/{name}" for name in HOST}
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "driver can't be loaded" in said


def records_of_two_nodes() -> list[dict]:
    """Four ranks, of which 0 and 2 are the first ones of their nodes."""
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % 2)
    config = checkpoint_config(
        parallel={"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1},
        model={"num_layers": 4},
        training={"train_iters": 2, "eval_iters": 0},
        optimizer={"lr_warmup_iters": 1},
    )
    return [record for record in train_on_this_rank(config).records if record["event"] == "train"]


def test_every_node_is_in_the_record() -> None:
    results = run_on_ranks(4, records_of_two_nodes)
    (record,) = results[0]
    nodes = {name for name in record if name.startswith("node/")}
    assert nodes == {f"node/{number}/{name}" for number in (0, 1) for name in HOST}
    assert all(math.isfinite(record[name]) for name in nodes)
