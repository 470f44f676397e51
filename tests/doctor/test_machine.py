"""The checks of the machine, on machines that are described by files, and under limits that are set for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp8.doctor import host_checks as machine
from megatron_fp8.doctor.finding import Finding, HostContext, Status

HERE = HostContext()
H100 = "NVIDIA H100 80GB HBM3, 580.95.05, 81559, 1024, {errors}"


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A /dev with two GPUs, and nodes that are none."""
    directory = tmp_path / "dev"
    directory.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (directory / name).touch()
    return directory


def smi(tmp_path: Path, script: str) -> str:
    """An nvidia-smi that runs `script`."""
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_gpus_are_counted_by_their_device_files(devices: Path, tmp_path: Path) -> None:
    assert [path.name for path in machine.gpu_nodes(devices)] == ["nvidia0", "nvidia1"]
    assert machine.gpu_nodes(tmp_path / "nothing") == []


def test_a_driver_that_answers_is_well(devices: Path, tmp_path: Path) -> None:
    line = H100.format(errors="0")
    found = machine.driver(HERE, devices, smi(tmp_path, f'echo "{line}"; echo "{line}"'))
    assert found.status is Status.OK
    assert found.versions == {"NVIDIA driver": "580.95.05"}
    assert "2 x NVIDIA H100 80GB HBM3, 80 GiB each, 2.0 GiB in use" in found.text


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            "Driver/library version mismatch",
        ),
        (f'echo "{H100.format(errors="0")}"; echo "{H100.format(errors="3")}"', "GPU 1: 3"),
    ],
)
def test_a_driver_that_fails_and_broken_memory_are_faults(
    devices: Path, tmp_path: Path, script: str, said: str
) -> None:
    found = machine.driver(HERE, devices, smi(tmp_path, script))
    assert (found.status, said in found.text) == (Status.FAULT, True), found
    assert found.advice


def test_a_missing_nvidia_smi_is_a_fault_only_beside_gpus(devices: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-program")
    assert machine.driver(HERE, devices, missing).status is Status.FAULT
    assert machine.driver(HERE, tmp_path, missing).status is Status.ABSENT


def test_fewer_gpus_than_there_must_be_are_a_fault(devices: Path, tmp_path: Path) -> None:
    answer = smi(tmp_path, f'echo "{H100.format(errors="[N/A]")}"')
    assert machine.driver(HostContext(min_gpus=2), devices, answer).status is Status.OK
    found = machine.driver(HostContext(min_gpus=8), devices, answer)
    assert (found.status, found.text) == (Status.FAULT, "2 GPUs found, but --min-gpus asks for 8")


def test_shared_memory_needs_more_beside_gpus(devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LEAST_SHARED_BYTES", 1 << 60)
    assert machine.shared_memory(HERE, tmp_path, tmp_path).status is Status.OK
    found = machine.shared_memory(HERE, tmp_path, devices)
    assert found.status is Status.FAULT
    assert "--shm-size" in found.advice
    assert "emptyDir" in found.advice


def test_shared_memory_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    assert machine.shared_memory(HERE, Path("/proc"), tmp_path).status is Status.FAULT


def test_the_run_root_is_looked_at_without_being_made(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there"
    found = machine.disk(HostContext(run_root=str(root)))
    assert found.status is Status.OK
    assert list(tmp_path.iterdir()) == []
    assert machine.disk(HostContext(run_root="/proc/runs")).status is Status.FAULT


@pytest.mark.parametrize("limit", ["LEAST_FREE_BYTES", "LEAST_FREE_FILES"])
def test_a_full_disk_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(machine, limit, 1 << 60)
    assert machine.disk(HostContext(run_root=str(tmp_path))).status is Status.FAULT


def test_the_kind_of_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:1 / / rw - overlay overlay rw\n23 22 0:2 / /data rw shared:1 - nfs4 server:/x rw\n", encoding="utf-8"
    )
    assert machine.file_system(Path("/data/runs"), mounts) == "nfs4"
    assert machine.file_system(Path("/database"), mounts) == "overlay"


def test_a_home_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    assert machine.home(HERE, {"home": str(tmp_path)}).status is Status.OK
    found = machine.home(HERE, {"home": "/proc"})
    assert found.status is Status.FAULT
    assert "HOME" in found.advice


def limits_under(setting: str, devices: Path, system: Path) -> Finding:
    """What a process finds that was started under `ulimit SETTING`."""
    code = (
        "import json, sys; from pathlib import Path; from megatron_fp8.doctor import finding, host_checks as machine; "
        "print(json.dumps(machine.limits(finding.HostContext(), *map(Path, sys.argv[1:])).as_json()))"
    )
    command = f'ulimit {setting} && exec "$0" -c "$1" "$2" "$3"'
    said = subprocess.run(
        ["bash", "-c", command, sys.executable, code, devices, system], check=True, capture_output=True, text=True
    )
    return Finding.from_json(json.loads(said.stdout))


def test_limits(devices: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert limits_under("-n 4096", nothing, nothing).status is Status.OK
    few = limits_under("-n 512", nothing, nothing)
    assert (few.status, few.advice) == (Status.FAULT, "ulimit -n 65536")
    assert limits_under("-f 100000", nothing, nothing).status is Status.FAULT
    # Locked memory counts where GPUs and InfiniBand meet.
    adapter = tmp_path / "sys/class/infiniband/mlx5_0"
    adapter.mkdir(parents=True)
    assert limits_under("-l 64", nothing, tmp_path / "sys").status is Status.OK
    locked = limits_under("-l 64", devices, tmp_path / "sys")
    assert locked.status is Status.FAULT
    assert "mlx5_0" in locked.text


def test_a_group_with_few_processes_left_is_a_fault(tmp_path: Path) -> None:
    group = tmp_path / "fs/cgroup"
    group.mkdir(parents=True)
    (group / "pids.current").write_text("900\n", encoding="ascii")
    for most, status in (("1024\n", Status.FAULT), ("4096\n", Status.OK), ("max\n", Status.OK)):
        (group / "pids.max").write_text(most, encoding="ascii")
        assert machine.limits(HERE, tmp_path / "dev", tmp_path).status is status
