"""Rules of the section `profile`: what no run could trace is refused, with values that can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.config.check import check_config
from megatron_fp8.config.config_warnings import idle_keys
from megatron_fp8.config.facts import Facts
from megatron_fp8.config.load import load_config
from megatron_fp8.config.rules_run import check_profile
from tests.config.config_samples import SMALL, VOCAB_SIZE, write
from tests.small_run import small_config


@pytest.mark.parametrize(
    ("overrides", "key", "reason", "use"),
    [
        (["start=4"], "profile.stop", "starts a trace that never stops", "profile.stop=6"),
        (["start=99"], "profile.stop", "starts a trace that never stops", "profile.stop=100"),
        (["stop=4"], "profile.start", "stops a trace that never starts", "profile.start=2"),
        (["start=4", "stop=4"], "profile.stop", "must be greater than profile.start=4", "profile.stop=6"),
        (["start=98", "stop=102"], "profile.stop", "the run has 100 steps", "profile.stop=100"),
        (
            ["start=1", "stop=2", "ranks=[0,4]"],
            "profile.ranks",
            "rank: 4; the job has ranks 0 to 3",
            "profile.ranks=[0]",
        ),
        (["start=1", "stop=2", "ranks=[-1]"], "profile.ranks", "no such rank: -1", "profile.ranks=[0]"),
        (["start=1", "stop=2", "ranks=[]"], "profile.ranks", "the list of ranks is empty", "profile.ranks=[0]"),
        (["start=1", "stop=2", "ranks=[2,1,2]"], "profile.ranks", "duplicate ranks", "profile.ranks=[2,1]"),
    ],
)
def test_what_cannot_be_traced_is_refused(
    tmp_path: Path, overrides: list[str], key: str, reason: str, use: str
) -> None:
    loaded = load_config(write(tmp_path, SMALL), [f"profile.{override}" for override in overrides])
    (problem,) = check_config(loaded, 4, VOCAB_SIZE)
    assert problem.key == key
    assert reason in problem.reason
    assert use in problem.use_instead


@pytest.mark.parametrize(
    "profile", [{}, {"start": 0, "stop": 1}, {"start": 8, "stop": 10, "ranks": [1, 0]}, {"ranks": [99]}]
)
def test_what_can_be_traced_is_not(profile: dict[str, Any]) -> None:
    assert not list(check_profile(Facts(small_config(profile=profile), 2, None)))


def test_a_length_that_is_not_known_yet_refuses_nothing() -> None:
    config = small_config(profile={"start": 8, "stop": 1000, "ranks": [99]}, training={"train_iters": 0})
    assert not list(check_profile(Facts(config, None, None)))


def test_keys_of_a_trace_that_is_none_are_idle() -> None:
    def idle(**profile: Any) -> set[str]:
        keys = {key for keys, _, _ in idle_keys(small_config(profile=profile)) for key in keys}
        return {key for key in keys if key.startswith("profile.")}

    assert idle() == {"profile.ranks", "profile.record_shapes", "profile.profile_memory", "profile.with_stack"}
    assert idle(start=0, stop=1) == set()
