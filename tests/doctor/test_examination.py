"""What breaks in a check is a finding: an import that fails, a process that dies or hangs, ranks that differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8.doctor import packages, report
from megatron_fp8.doctor.examination import Patient, alone, examine
from megatron_fp8.doctor.finding import Finding, Status, Surroundings
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]


def doctor(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m megatron_fp8.doctor`, as a person starts it."""
    more = environment or {}
    path = os.pathsep.join([*filter(None, [more.pop("PYTHONPATH", "")]), str(ROOT)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    return subprocess.run(
        [sys.executable, "-m", "megatron_fp8.doctor", *arguments],
        env={**kept, **more, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def broken_torch(tmp_path: Path, code: str) -> dict[str, str]:
    """An environment in which `import torch` runs `code`."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(code, encoding="utf-8")
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ImportError('libcudart.so.13: no such file')", "ImportError: libcudart.so.13: no such file"),
        ("import os; os.abort()", "killed by SIGABRT"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_a_fault_and_not_a_traceback(tmp_path: Path, code: str, said: str) -> None:
    ended = doctor("--json", "--run-root", str(tmp_path), environment=broken_torch(tmp_path, code))
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr == ""
    told = json.loads(ended.stdout)
    faults = {finding["check"]: finding["text"] for finding in told["findings"] if finding["status"] == "FAULT"}
    assert list(faults) == ["torch"]
    assert said in faults["torch"]
    skipped = [finding["check"] for finding in told["findings"] if "not looked at" in finding["text"]]
    assert {"transformer engine", "fp8", "gloo", "nccl"} <= set(skipped)


@pytest.mark.slow
def test_a_check_that_hangs_is_a_fault_that_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_torch(tmp_path, "import time\n\ndef wait_for_ever():\n    time.sleep(1000)\n\nwait_for_ever()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # Time enough for the checks before it, which import nothing large.
    found = {one.check: one for one in alone(Patient(Surroundings(str(tmp_path)), False, seconds_per_check=15))}
    assert found["torch"].status is Status.FAULT
    assert "no answer within 15 s" in found["torch"].text
    assert "wait_for_ever" in found["torch"].text
    assert found["packages"].status is not Status.ABSENT


def test_missing_packages_and_old_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "requires", lambda name: ["torch>=2.13", "rich>=13", "numpy", 'x; extra == "dev"'])
    monkeypatch.setattr(packages, "installed", {"torch": "2.12.0+cu130", "rich": "15.0"}.get)
    found = packages.packages(Surroundings())
    assert found.status is Status.FAULT
    assert found.text == "missing, or of a version that does not fit: torch>=2.13 (is 2.12.0+cu130), numpy"
    assert found.advice == "pip install 'torch>=2.13' 'numpy'"


def test_wandb_without_a_login_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert packages.wandb(Surroundings()).status is Status.ABSENT
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    found = packages.wandb(Surroundings())
    assert found.status is Status.OK
    assert "kkk" not in json.dumps(found.as_json())


def shared_files_on(rank_roots: list[str]) -> Finding:
    """What `shared_files` finds on this rank, whose run root is its own of `rank_roots`."""
    import torch.distributed

    from megatron_fp8.doctor import together

    together.SECONDS_TO_BE_SEEN = 0.2
    rank = torch.distributed.get_rank()
    return together.shared_files(Surroundings(rank_roots[rank], rank=rank, world_size=len(rank_roots)))


def test_run_roots_that_are_not_one_directory_are_found_and_the_ranks_named(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("shared", "other")]
    for root in roots:
        root.mkdir()
    apart = run_on_ranks(3, shared_files_on, [str(roots[0]), str(roots[0]), str(roots[1])])
    assert {one.status for one in apart} == {Status.FAULT}
    assert "(rank 2) does not see rank 0, rank 1" in apart[0].text
    together = run_on_ranks(2, shared_files_on, [str(roots[0])] * 2)
    assert {one.status for one in together} == {Status.OK}
    assert [list(root.iterdir()) for root in roots] == [[], []]


def same_versions_on(versions: list[dict[str, str]]) -> Finding:
    """What `same_versions` finds on this rank, which has its own of `versions`."""
    import torch.distributed

    from megatron_fp8.doctor import together

    rank = torch.distributed.get_rank()
    mine = Finding("packages", Status.OK, "", versions=versions[rank])
    return together.same_versions(Surroundings(rank=rank, world_size=len(versions), findings=(mine,)))


def test_different_versions_are_found(tmp_path: Path) -> None:
    here = {"torch": "2.13.0", "NCCL": "2.29.7"}
    (first, _) = run_on_ranks(2, same_versions_on, [here, {**here, "NCCL": "2.27.3"}])
    assert first.status is Status.FAULT
    assert "NCCL is 2.27.3" in first.text
    (first, _) = run_on_ranks(2, same_versions_on, [here, dict(here)])
    assert first.status is Status.OK


def test_ranks_share_a_row_where_all_is_well_and_have_their_own_where_not() -> None:
    well = Finding("limits", Status.OK, "1 GiB")
    bad = Finding("limits", Status.FAULT, "few files", "ulimit")
    rows = report.rows([[well], [replace(well, text="2 GiB")], [bad], [bad]])
    assert [(row.finding.text, row.ranks) for row in rows] == [("1 GiB", (0, 1)), ("few files", (2, 3))]
    assert report.num_faults([[well], [bad], [bad]]) == 1


def test_findings_survive_the_way_between_processes() -> None:
    finding = Finding("fp8", Status.ABSENT, "[no] GPU", "", {"NCCL": "2"})
    surroundings = Surroundings("r", 1, 2, 3, "file://x", (finding,))
    assert Surroundings.from_json(json.loads(json.dumps(surroundings.as_json()))) == surroundings


@pytest.mark.slow
def test_a_machine_where_all_is_well_has_no_fault(tmp_path: Path) -> None:
    (found,) = examine(Patient(Surroundings(str(tmp_path)), launched=False, seconds_per_check=120))
    faults = [finding for finding in found if finding.status is Status.FAULT]
    assert faults == []
    by_check = {finding.check: finding for finding in found}
    assert by_check["gloo"].text.startswith("all-reduce over")
    assert by_check["fp8"].status is Status.OK
    assert by_check["data helper"].status is Status.OK


@pytest.mark.slow
def test_under_torchrun_the_ranks_are_examined_together(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    ended = subprocess.run(
        [*command, "-m", "megatron_fp8.doctor", "--json", "--run-root", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout)
    by_check = {finding["check"]: finding for finding in told["findings"]}
    assert by_check["shared files"]["status"] == "ok"
    assert by_check["same versions"]["ranks"] == [0, 1, 2]
