"""The images' files: what a Dockerfile is read as, and what it may copy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docker.image_root import context_files, ignored, read_instructions, substituted

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
    assert {"pretrain.py", "docker/entrypoint.sh", "megatron_fp8/commands/doctor.py", "pyproject.toml"} <= paths
    top = {path.partition("/")[0] for path in paths}
    assert top == {
        *("LICENSE", "README.md", "pretrain.py", "pyproject.toml"),
        *("configs", "docker", "locks", "megatron_fp8", "tools"),
    }


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_pinned_by_digest_and_does_not_run_as_root(path: Path) -> None:
    steps = read_instructions(path.read_text(encoding="utf-8"))
    arguments = dict(step.text.split("=", 1) for step in steps if step.name == "ARG")
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", arguments["BASE_DIGEST"])
    assert [step.text for step in steps if step.name == "USER"] == ["${USER_ID}:${USER_ID}"]
    assert int(arguments["USER_ID"]) > 0
    assert "entrypoint.sh" in next(step.text for step in steps if step.name == "ENTRYPOINT")
