"""What `make venv` asks of pip, in which order, and when it begins anew: a stand-in for Python writes it down."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Answers as a Python of version $VERSION would, makes "environments" of itself, and keeps what pip is to install.
PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*) cat "$(dirname "$0")/version" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$(dirname "$0")/version" "$3/bin/" && mv "$3/bin/mine" "$3/bin/python" ;;
    "-m pip")
        if [ "$3" = check ]; then cat "$HOME/check" && exit 1; fi
        while [ "$1" != --requirement ] && [ $# -gt 1 ]; do shift; done
        if [ "$1" = --requirement ]; then echo ===; cat "$2"; else printf '=== %s\\n' "$1"; fi >>"$HOME/installed" ;;
esac
"""
ACCEPTED = "torch 2.13.0 requires triton, which is not installed.\n"


class Machine:
    """A home directory with one Python in it, and an environment that is made of it."""

    def __init__(self, directory: Path) -> None:
        self.home = directory
        self.environment = directory / "environment"
        (directory / "check").write_text(ACCEPTED, encoding="utf-8")

    def make(self, version: str, **variables: str) -> subprocess.CompletedProcess[str]:
        python = self.home / "mine"
        python.write_text(PYTHON, encoding="utf-8")
        python.chmod(0o755)
        (self.home / "version").write_text(f"{version}\n", encoding="utf-8")
        (self.home / "installed").write_text("", encoding="utf-8")
        path = f"{self.home}/bin:/usr/bin:/bin"
        return subprocess.run(
            [ROOT / "tools" / "make_venv.sh", self.environment],
            env={"HOME": str(self.home), "PATH": path, "PYTHON": str(python), **variables},
            capture_output=True,
            text=True,
        )

    def installed(self) -> list[str]:
        """What each call of pip was given."""
        return (self.home / "installed").read_text(encoding="utf-8").split("===\n")[1:]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def locks() -> str:
    texts = [(ROOT / "locks" / f"{part}.lock").read_text(encoding="utf-8") for part in ("run", "dev")]
    return "".join(line for text in texts for line in text.splitlines(keepends=True) if not line.startswith("#"))


def test_all_of_two_locks_is_installed_what_builds_the_rest_first(machine: Machine) -> None:
    ended = machine.make("3.12")
    assert ended.returncode == 0, ended.stderr
    first, second, third = machine.installed()
    assert first.startswith("setuptools==")
    assert {line.partition("-")[0] for line in second.splitlines() if not line.startswith(" ")} == {"nvidia"}
    everything, _, last = third.partition("=== ")
    assert everything == locks()
    assert last == ".\n", "the project itself, without an index"
    assert "Megatron Core" not in ended.stdout


def test_what_an_older_python_means_is_said_in_one_line(machine: Machine) -> None:
    lines = machine.make("3.11").stdout.splitlines()
    assert sum("Python 3.11 takes Megatron Core 0.16.1" in line and "0.19.2" in line for line in lines) == 1


def test_without_hashes_versions_stay(machine: Machine) -> None:
    machine.make("3.12", UNLOCKED="1")
    _, _, third = machine.installed()
    assert "--hash" not in third
    assert "\\" not in third
    assert "\ntorch==2.13.0\n" in third
    assert third.partition("=== ")[0].count("\n") == locks().count("==")


def test_an_environment_of_another_python_is_made_anew(machine: Machine) -> None:
    machine.make("3.11")
    mark = machine.environment / "mark"
    mark.touch()
    machine.make("3.11")
    assert mark.exists()
    machine.make("3.12")
    assert not mark.exists()


def test_a_fault_that_no_gpu_explains_is_an_error(machine: Machine) -> None:
    (machine.home / "check").write_text(ACCEPTED + "a 1.0 has requirement b>2, but you have b 1.\n", encoding="utf-8")
    ended = machine.make("3.12")
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "the environment does not fit together:",
        "a 1.0 has requirement b>2, but you have b 1.",
    ]


def test_a_machine_that_no_lock_is_for_is_refused_before_anything_is_made(machine: Machine) -> None:
    uname = machine.home / "bin" / "uname"
    uname.parent.mkdir()
    uname.write_text("#!/bin/sh\necho Darwin arm64\n", encoding="utf-8")
    uname.chmod(0o755)
    ended = machine.make("3.12")
    assert ended.returncode == 1
    assert "not for Darwin arm64: use docker/Dockerfile.cpu" in ended.stderr
    assert not machine.environment.exists()
