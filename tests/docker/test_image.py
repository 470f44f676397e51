"""The images' files: what a Dockerfile is read as, what it may copy, and what the GPU image's lock holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import image_lock
from tools.image_root import context_files, ignored, read_instructions, substituted

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = [ROOT / "docker" / "Dockerfile", ROOT / "docker" / "Dockerfile.cpu"]


def test_instructions_are_joined_at_backslashes_and_know_their_line() -> None:
    text = "# syntax\nFROM a AS b\n\nRUN one \\\n    # between\n    && two\nenv A=1\n"
    found = [(step.name, step.text, step.line) for step in read_instructions(text)]
    assert found == [("FROM", "a AS b", 2), ("RUN", "one && two", 4), ("ENV", "A=1", 7)]
    with pytest.raises(ValueError, match="line 1: the file ends inside"):
        read_instructions("RUN one \\\n")


def test_variables_are_replaced_and_unknown_ones_refused() -> None:
    assert substituted("$A-${B}/x", {"A": "1", "B": "2"}) == "1-2/x"
    with pytest.raises(ValueError, match=r"\$C has no value"):
        substituted("$C", {})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b.py", False),
        ("a/__pycache__/b.pyc", True),
        ("runs/x", True),
        ("pretrain.py", False),
        ("x/pretrain.py", True),
    ],
)
def test_the_last_rule_that_fits_decides(path: str, expected: bool) -> None:
    assert ignored(Path(path), ["*", "!a", "!pretrain.py", "**/__pycache__"]) is expected


def test_an_image_gets_the_program_and_nothing_else() -> None:
    paths = {str(path) for path in context_files(ROOT)}
    assert {"pretrain.py", "docker/entrypoint.sh", "megatron_fp8/doctor/__main__.py", "pyproject.toml"} <= paths
    top = {path.partition("/")[0] for path in paths}
    assert top == {
        *("LICENSE", "README.md", "constraints.txt", "pretrain.py", "pyproject.toml"),
        *("configs", "docker", "megatron_fp8", "tools"),
    }


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_pinned_by_digest_and_does_not_run_as_root(path: Path) -> None:
    steps = read_instructions(path.read_text(encoding="utf-8"))
    arguments = dict(step.text.split("=", 1) for step in steps if step.name == "ARG")
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", arguments["BASE_DIGEST"])
    assert [step.text for step in steps if step.name == "USER"] == ["${USER_ID}:${USER_ID}"]
    assert int(arguments["USER_ID"]) > 0
    assert "entrypoint.sh" in next(step.text for step in steps if step.name == "ENTRYPOINT")


def test_the_gpu_lock_has_every_dependency_in_a_version_that_fits() -> None:
    from packaging.requirements import Requirement

    locked = {}
    for lock in (image_lock.WHEELS_LOCK, image_lock.SOURCE_LOCK):
        entries = image_lock._entries(lock.read_text(encoding="utf-8"))
        assert all(hashes for _, hashes in entries.values())
        locked.update({name: version for name, (version, _) in entries.items()})
    # The list of dependencies, without a TOML parser, which Python 3.10 lacks.
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.findall(r'^    "([^"]+)",', project.partition("\ndependencies = [")[2].partition("\n]")[0], re.M)
    assert len(needed) > 20
    wanted = [line.partition("#")[0] for line in image_lock.WANTED.read_text(encoding="utf-8").splitlines()]
    for text in [*needed, *filter(str.strip, wanted)]:
        requirement = Requirement(text)
        assert requirement.name in locked, f"{text}: run tools/image_lock.py"
        assert requirement.specifier.contains(locked[requirement.name]), f"{text}: run tools/image_lock.py"


def test_every_pip_line_of_the_gpu_image_is_accounted_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(image_lock, "_check_lock", lambda lock: f"looked at {lock.name}")
    said = "\n".join(image_lock.check(DOCKERFILES[0]))
    assert "looked at gpu.lock" in said
    assert "looked at gpu-source.lock" in said
    other = tmp_path / "Dockerfile"
    other.write_text("RUN pip install \\\n    numpy\n", encoding="utf-8")
    with pytest.raises(image_lock.LockError, match="numpy: packages without a lock"):
        image_lock.check(other)


@pytest.mark.slow
def test_the_registry_has_what_the_gpu_image_installs() -> None:
    try:
        said = image_lock.check(DOCKERFILES[0])
    except image_lock.LockError as error:
        if "uv is missing" in str(error) or "dns error" in str(error).lower() or "connect" in str(error).lower():
            pytest.skip(str(error).splitlines()[0])
        raise
    assert sum("hashes are the registry's" in line for line in said) == 2
