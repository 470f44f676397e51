"""What breaks in a check is a finding: an import that fails, a process that dies or hangs, ranks that differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8.commands import doctor as report
from megatron_fp8.doctor import examination
from megatron_fp8.doctor import package_checks as packages
from megatron_fp8.doctor.examination import DoctorOptions, alone, examine
from megatron_fp8.doctor.finding import Finding, HostContext, Status
from megatron_fp8.doctor.library_checks import judged, loaded_files
from megatron_fp8.doctor.rank_checks import same_versions
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
    skipped = [finding["check"] for finding in told["findings"] if "skipped" in finding["text"]]
    assert {"transformer engine", "fp8", "gloo", "nccl"} <= set(skipped)


@pytest.mark.slow
def test_a_check_that_hangs_is_a_fault_that_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_torch(tmp_path, "import time\n\ndef wait_for_ever():\n    time.sleep(1000)\n\nwait_for_ever()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # Time enough for the checks before it, which import nothing large.
    found = {one.check: one for one in alone(DoctorOptions(HostContext(str(tmp_path)), False, seconds_per_check=15))}
    assert found["torch"].status is Status.FAULT
    assert "no answer within 15 s" in found["torch"].text
    assert "wait_for_ever" in found["torch"].text
    assert found["packages"].status is not Status.ABSENT


def test_missing_packages_and_old_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        packages, "requires", lambda name: ["torch>=2.13", "rich>=13", "numpy; extra == 'train'", "x; extra == 'dev'"]
    )
    monkeypatch.setattr(packages, "installed", {"torch": "2.12.0+cu130", "rich": "15.0"}.get)
    found = packages.packages(HostContext())
    assert found.status is Status.FAULT
    assert found.text == "missing or incompatible: torch>=2.13 (is 2.12.0+cu130), numpy"
    assert found.advice == "pip install 'torch>=2.13' 'numpy'"


def test_wandb_without_a_login_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert packages.wandb(HostContext()).status is Status.ABSENT
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    found = packages.wandb(HostContext())
    assert found.status is Status.OK
    assert "kkk" not in json.dumps(found.as_json())


def shared_files_on(rank_roots: list[str]) -> Finding:
    """What `shared_files` finds on this rank, whose run root is its own of `rank_roots`."""
    import torch.distributed

    from megatron_fp8.doctor import rank_checks as together

    together.SECONDS_TO_BE_SEEN = 0.2
    rank = torch.distributed.get_rank()
    return together.shared_files(HostContext(rank_roots[rank], rank=rank, world_size=len(rank_roots)))


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


def test_different_versions_are_found() -> None:
    here = {"torch": "2.13.0", "NCCL": "2.29.7"}
    there = {**here, "NCCL": "2.27.3"}
    by_rank = [[Finding("torch", Status.OK, "", versions=versions)] for versions in (here, there)]
    found = same_versions(["node0", "node1"], by_rank)
    assert found.status is Status.FAULT
    assert found.text == "NCCL is 2.27.3 on node1 (rank 1) and 2.29.7 on node0 (rank 0)"
    assert same_versions(["node0", "node1"], [by_rank[0], by_rank[0]]).status is Status.OK


# Checks of a process that has them from its `sitecustomize`, which Python imports first.
POISONS = """
import ctypes, json, os, sys, types
from megatron_fp8.doctor import examination as checks
from megatron_fp8.doctor.finding import Finding, Status
from megatron_fp8.doctor.library_checks import loaded_files

def looks(context):
    seen = {"files": loaded_files(), "POISONED": os.environ.get("POISONED"), "flag": json.loads("1.5")}
    return Finding("looks", Status.OK, json.dumps(seen))

def loads(context):
    ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
    return Finding("loads", Status.OK, json.dumps(loaded_files()))

def sets(context):
    os.environ["POISONED"] = "1"
    json.loads = lambda *arguments, **named: "poisoned"
    return Finding("sets", Status.OK, "")

def raises(context):
    raise RuntimeError("undefined symbol: x")

def crashes(context):
    os.abort()

module = types.ModuleType("megatron_fp8.doctor.poisons")
module.__dict__.update({one.__name__: one for one in (looks, loads, sets, raises, crashes)})
module.__dict__["looks_again"] = looks
sys.modules[module.__name__] = module
checks.ALONE.clear()
checks.ALONE.update({name: f"poisons.{name}" for name in CHECKS})
"""


def test_what_one_check_loads_sets_or_breaks_is_nothing_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["looks", "loads", "sets", "raises", "crashes", "looks_again"]
    library = tmp_path / "libcudnn_graph.so.9"
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", library], check=True)
    (tmp_path / "sitecustomize.py").write_text(f"LIBRARY = {str(library)!r}\nCHECKS = {names}\n{POISONS}", "utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setattr(examination, "ALONE", dict.fromkeys(names, ""))
    # One at a time, so that whatever could outlast a check is there for the next.
    monkeypatch.setattr(examination, "_PROCESSES_AT_ONCE", 1)
    options = DoctorOptions(HostContext(str(tmp_path)), False, seconds_per_check=60)
    found = dict(zip(names, alone(options), strict=True))
    assert json.loads(found["loads"].text) == [str(library)]
    clean = {"files": [], "POISONED": None, "flag": 1.5}
    assert [json.loads(found[name].text) for name in ("looks", "looks_again")] == [clean, clean]
    assert found["sets"].status is Status.OK
    assert (found["raises"].status, found["raises"].text) == (Status.FAULT, "RuntimeError: undefined symbol: x")
    assert "killed by SIGABRT" in found["crashes"].text


def test_a_check_is_not_started_after_the_fault_of_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def answer(check: str, *rest: object) -> Finding:
        started.append(check)
        return Finding(check, Status.FAULT if check == "transformer engine" else Status.OK, "")

    monkeypatch.setattr(examination, "_answer", answer)
    found = {one.check: one for one in alone(DoctorOptions(HostContext(str(tmp_path)), False, seconds_per_check=1))}
    assert list(found) == list(examination.ALONE)
    pointless = {"cuda libraries", "fp8", "fused kernels", "megatron core"}
    assert {name for name, one in found.items() if one.text.startswith("skipped")} == pointless
    assert set(started) == set(examination.ALONE) - pointless
    assert started.index("torch") < started.index("transformer engine")


def test_a_library_of_cuda_that_is_there_twice_or_from_elsewhere_is_a_fault(tmp_path: Path) -> None:
    packages_of_torch = "/venv/lib/python3.12/site-packages"
    wheels = [f"{packages_of_torch}/nvidia/{name}" for name in ("cu13/lib/libcublas.so.13", "nccl/lib/libnccl.so.2")]
    system = "/usr/lib/x86_64-linux-gnu/libnccl.so.2.28.3"
    driver = "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95"
    maps = tmp_path / "maps"
    places = [*wheels, wheels[0], system, driver, "/lib/libm.so.6", "[heap]", "/dev/nvidia0"]
    maps.write_text("".join(f"7f0-7f1 r-xp 0 08:01 11   {path}\n" for path in places) + "7f2-7f3 rw-p 0 00:00 0\n")
    assert loaded_files(maps) == sorted([*wheels, system])
    here = Path(packages_of_torch)
    assert judged(wheels, here).status is Status.OK
    twice = judged([*wheels, system], here)
    assert (twice.status, twice.text) == (Status.FAULT, f"loaded twice: libnccl from {wheels[1]} and {system}")
    strange = judged([wheels[0], system], here)
    assert strange.status is Status.FAULT
    assert strange.text == f"not from the packages torch was installed with: {system}"
    assert judged([], here).status is Status.ABSENT


def test_ranks_share_a_row_where_all_is_well_and_have_their_own_where_not() -> None:
    well = Finding("limits", Status.OK, "1 GiB")
    bad = Finding("limits", Status.FAULT, "few files", "ulimit")
    rows = report.rows([[well], [replace(well, text="2 GiB")], [bad], [bad]])
    assert [(row.finding.text, row.ranks) for row in rows] == [("1 GiB", (0, 1)), ("few files", (2, 3))]
    assert report.num_faults([[well], [bad], [bad]]) == 1


def test_findings_survive_the_way_between_processes() -> None:
    finding = Finding("fp8", Status.ABSENT, "[no] GPU", "", {"NCCL": "2"})
    context = HostContext("r", 1, 2, 3, "file://x", (finding,))
    assert HostContext.from_json(json.loads(json.dumps(context.as_json()))) == context


@pytest.mark.slow
def test_a_machine_where_all_is_well_has_no_fault(tmp_path: Path) -> None:
    (found,) = examine(DoctorOptions(HostContext(str(tmp_path)), launched=False, seconds_per_check=120))
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
