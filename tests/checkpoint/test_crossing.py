"""What one version of Megatron Core wrote, the other reads to the last bit, with every tool; both ways.

The other version's interpreter is named by MEGATRON_FP8_OTHER_PYTHON; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest

from tests.checkpoint import crossing
from tests.e2e.launch import ROOT, clean_environment

OTHER = "MEGATRON_FP8_OTHER_PYTHON"

pytestmark = pytest.mark.skipif(OTHER not in os.environ, reason=f"{OTHER} names no interpreter with the other version")


@dataclass(frozen=True)
class Crossed:
    """What both versions make of the runs that each of them wrote, by writer."""

    here: dict[str, Any]
    there: dict[str, Any]


def call_other(*arguments: object) -> None:
    command = [os.environ[OTHER], "-m", "tests.checkpoint.crossing", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> Crossed:
    root = tmp_path_factory.mktemp("crossed")
    ours, theirs = root / "ours", root / "theirs"
    for place in (ours, theirs):
        place.mkdir()
    crossing.write(ours)
    call_other(theirs, ours, root / "there", root / "result.json")
    here = {place.name: crossing.use(place, root / "here" / place.name) for place in (ours, theirs)}
    return Crossed(json.loads(json.dumps(here)), json.loads((root / "result.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("writer", ["ours", "theirs"])
@pytest.mark.parametrize("reader", ["here", "there"])
def test_every_bit_is_taken_over_on_another_layout(crossed: Crossed, reader: str, writer: str) -> None:
    found = getattr(crossed, reader)[writer]
    assert found["not equal"] == []
    assert found["equal"] > 50
    note = "random streams of dropout start from scratch: the saved ones belong to another layout"
    assert found["notes"] == [[note]] * 2


@pytest.mark.parametrize("writer", ["ours", "theirs"])
def test_tools_find_the_same_under_both_versions(crossed: Crossed, writer: str) -> None:
    here, there = crossed.here[writer], crossed.there[writer]
    assert here == there
    assert here["verify"] == 0
    assert here["loss"] == here["loss of imported"]
    code, inspected = here["inspect"]
    assert (code, inspected["layout"]["pipeline_model_parallel_size"]) == (0, 2)
    assert here["diff"] == [0, {**here["diff"][1], "tensors": []}]
    assert here["diff"][1]["equal"] > 10


def test_the_two_are_different_versions(crossed: Crossed) -> None:
    """Else the tests above would say nothing."""
    versions = {crossed.here[writer]["inspect"][1]["versions"]["megatron-core"] for writer in ("ours", "theirs")}
    assert len(versions) == 2
