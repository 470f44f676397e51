"""The lock files hold what constraints.txt says, file by file, for every Python, and no place to fetch it from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCK, TORCH_LOCK = ROOT / "requirements.lock", ROOT / "requirements-torch.lock"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def locked(path: Path) -> dict[Requirement, list[str]]:
    """Each requirement of a lock and its hashes."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split("--hash", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {Requirement(line[0]): HASH.findall(f"--hash{line[1]}" if line[1:] else "") for line in lines}


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def versions(requirements: list[Requirement], python: str) -> dict[str, str]:
    """The version of each package under a Python on Linux."""
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.7"}
    environment |= {"sys_platform": "linux", "platform_machine": "x86_64"}
    applying = [one for one in requirements if one.marker is None or one.marker.evaluate(environment)]  # type: ignore[arg-type]
    assert len({one.name for one in applying}) == len(applying), "one version of each"
    return {one.name: str(one.specifier) for one in applying}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_locks_have_the_versions_of_the_constraints(python: str) -> None:
    wanted = versions(constraints(), python)
    torch = {"torch": wanted.pop("torch")}
    assert versions(list(locked(LOCK)), python) == wanted, "run tools/lock.sh"
    with_cuda = versions(list(locked(TORCH_LOCK)), python)
    assert torch.items() <= with_cuda.items(), "run tools/lock.sh"
    assert not with_cuda.keys() & wanted.keys()


@pytest.mark.parametrize("path", [LOCK, TORCH_LOCK], ids=lambda path: path.name)
def test_every_package_has_hashes_and_no_address(path: Path) -> None:
    assert [str(one) for one, hashes in locked(path).items() if not hashes] == []
    text = path.read_text(encoding="utf-8")
    assert "://" not in text
    assert not re.search(r"--(index|extra-index|find-links|trusted-host)", text)
    assert all(one.url is None for one in locked(path))


def test_an_environment_is_made_of_the_locks() -> None:
    """With pip checking hashes, and no index for what a lock may lack."""
    script = (ROOT / "tools" / "make_venv.sh").read_text(encoding="utf-8")
    assert "--require-hashes --no-deps" in script
    assert "install_locked requirements.lock" in script
    assert "install --no-index --editable '.[dev]'" in script
