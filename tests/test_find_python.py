"""`make` finds a Python wherever people keep one: stand-ins for interpreters, of versions that no machine has."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def interpreter(path: Path, answer: str, code: int = 0) -> Path:
    """A program at `path` that answers what the script asks a Python, and ends with `code`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home of a person"
    path.mkdir()
    return path


def find(home: Path, *versions: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (home / "on-path").mkdir(exist_ok=True)
    return subprocess.run(
        [ROOT / "tools" / "find_python.sh", *versions],
        env={"HOME": str(home), "PATH": f"{home}/on-path:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "place",
    [
        "on-path/python3.98",
        "on-path/python3",
        "on-path/python",
        ".pyenv/versions/3.98.1/bin/python3.98",
        ".asdf/installs/python/3.98.1/bin/python3.98",
        ".local/share/uv/python/cpython-3.98.1-linux-x86_64-gnu/bin/python3.98",
        ".local/share/mise/installs/python/3.98.1/bin/python3.98",
        ".local/bin/python3.98",
        "miniconda3/bin/python3.98",
        "miniforge3/envs/train/bin/python3.98",
        ".local/share/mamba/envs/train/bin/python3.98",
    ],
)
def test_a_python_is_found_where_people_keep_it(home: Path, place: str) -> None:
    there = interpreter(home / place, "3.98 ")
    found = find(home, "3.99", "3.98")
    assert (found.stdout.strip(), found.returncode, found.stderr) == (str(there), 0, "")


@pytest.mark.parametrize(
    ("variable", "value", "place"),
    [
        ("PYENV_ROOT", "{}/elsewhere", "elsewhere/versions/3.98.1/bin/python3.98"),
        ("ASDF_DATA_DIR", "{}/elsewhere", "elsewhere/installs/python/3.98.1/bin/python3.98"),
        ("UV_PYTHON_INSTALL_DIR", "{}/elsewhere", "elsewhere/cpython-3.98.1-linux-x86_64-gnu/bin/python3.98"),
        ("XDG_DATA_HOME", "{}/elsewhere", "elsewhere/uv/python/cpython-3.98.1-linux-x86_64-gnu/bin/python3.98"),
        ("CONDA_PREFIX", "{}/elsewhere/envs/a", "elsewhere/envs/a/bin/python3.98"),
        ("CONDA_EXE", "{}/elsewhere/bin/conda", "elsewhere/envs/b/bin/python3.98"),
        ("MAMBA_ROOT_PREFIX", "{}/elsewhere", "elsewhere/envs/c/bin/python3.98"),
    ],
)
def test_a_manager_may_be_told_to_keep_them_elsewhere(home: Path, variable: str, value: str, place: str) -> None:
    there = interpreter(home / place, "3.98 ")
    assert find(home, "3.98", **{variable: value.format(home)}).stdout.strip() == str(there)


def test_pyenv_may_know_a_root_that_no_variable_names(home: Path) -> None:
    pyenv = interpreter(home / "on-path" / "pyenv", str(home / "opt" / "pyenv"))
    there = interpreter(home / "opt" / "pyenv" / "versions" / "3.98.1" / "bin" / "python3.98", "3.98 ")
    assert find(home, "3.98").stdout.strip() == str(there)
    assert pyenv.exists()


def test_a_conda_environment_outside_conda_s_directory_is_known_by_conda_s_list(home: Path) -> None:
    there = interpreter(home / "project" / "env" / "bin" / "python3.98", "3.98 ")
    (home / ".conda").mkdir()
    (home / ".conda" / "environments.txt").write_text(f"{home}/gone\n{home}/project/env\n", encoding="utf-8")
    assert find(home, "3.98").stdout.strip() == str(there)


def test_a_shim_of_a_version_that_is_not_chosen_is_passed_over(home: Path) -> None:
    shim = home / "on-path" / "python3.98"
    interpreter(shim, "", code=127)
    there = interpreter(home / ".pyenv" / "versions" / "3.98.1" / "bin" / "python3.98", "3.98 ")
    assert find(home, "3.98").stdout.strip() == str(there)


def test_the_first_version_wins_wherever_it_is_and_then_the_place(home: Path) -> None:
    interpreter(home / "on-path" / "python3.97", "3.97 ")
    conda = interpreter(home / "miniconda3" / "bin" / "python3.98", "3.98 ")
    assert find(home, "3.98", "3.97").stdout.strip() == str(conda)
    pyenv = interpreter(home / ".pyenv" / "versions" / "3.98.1" / "bin" / "python3.98", "3.98 ")
    assert find(home, "3.98", "3.97").stdout.strip() == str(pyenv)


def test_none_that_serves_is_an_error_that_says_why_and_what_to_install(home: Path) -> None:
    interpreter(home / "on-path" / "python3.98", "3.98 it lacks venv or ensurepip")
    found = find(home, "3.99", "3.98")
    assert found.returncode == 1
    assert found.stdout == ""
    assert "No Python 3.99 3.98 was found" in found.stderr
    assert f"{home}/on-path/python3.98 is Python 3.98, but it lacks venv" in found.stderr
    assert "uv python install 3.99" in found.stderr


def test_a_named_python_is_taken_or_refused_but_not_replaced(home: Path) -> None:
    interpreter(home / "on-path" / "python3.98", "3.98 ")
    named = interpreter(home / "mine", "3.97 ")
    assert find(home, "3.98", "3.97", PYTHON=str(named)).stdout.strip() == str(named)
    assert find(home, "3.98", PYTHON="python3.98").stdout.strip() == str(home / "on-path" / "python3.98")
    refused = find(home, "3.98", PYTHON=str(named))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"PYTHON={named} is Python 3.97: it has to be one of 3.98" in refused.stderr
    missing = find(home, "3.98", PYTHON="python3.77")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "PYTHON=python3.77 does not start" in missing.stderr


def test_a_real_one_answers(home: Path) -> None:
    """What the tests run on, found by its path: the question is one that a Python understands."""
    import sys

    version = "{}.{}".format(*sys.version_info)
    found = find(home, version, PYTHON=os.path.realpath(sys.executable))
    assert found.stdout.strip() == os.path.realpath(sys.executable), found.stderr
