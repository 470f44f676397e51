"""Rules of the section `faults`: a run that may go back has something to go back to."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fp8.config.check import check_config
from megatron_fp8.config.config_warnings import idle_keys
from megatron_fp8.config.facts import Facts
from megatron_fp8.config.load import load_config
from megatron_fp8.config.rules_run import check_faults
from tests.config.config_samples import SMALL, VOCAB_SIZE, write
from tests.small_run import small_config


@pytest.mark.parametrize("policy", ["nonfinite", "spike"])
@pytest.mark.parametrize(
    ("overrides", "key", "reason", "use"),
    [
        (
            ["save=false", "save_interval=10"],
            "faults.{policy}",
            "there is no checkpoint to roll back to",
            "checkpoint.save=true",
        ),
        (["save_interval=0"], "faults.{policy}", "no checkpoint is written", "checkpoint.save_interval=10"),
        (["save_interval=100"], "faults.{policy}", "before the end of the run", "faults.{policy}="),
        (["save_interval=10", "keep_last=1"], "checkpoint.keep_last", "are all newer", "checkpoint.keep_last=2 or"),
    ],
)
def test_there_must_be_a_way_back(
    tmp_path: Path, policy: str, overrides: list[str], key: str, reason: str, use: str
) -> None:
    keys = [f"faults.{policy}=rewind", *(f"checkpoint.{override}" for override in overrides)]
    (problem,) = check_config(load_config(write(tmp_path, SMALL), keys), 4, VOCAB_SIZE)
    assert problem.key == key.format(policy=policy)
    assert reason in problem.reason
    assert use.format(policy=policy) in problem.use_instead


@pytest.mark.parametrize(
    ("save_interval", "num_steps", "keep_last"), [(1, 5, 6), (2, 5, 4), (5, 5, 2), (4, 8, 3), (10, 1, 2), (3, 4, 3)]
)
def test_so_many_checkpoints_are_enough(save_interval: int, num_steps: int, keep_last: int) -> None:
    """By trying out: of the newest ones at any step at which a spike is found, one is from before it."""
    assert enough(save_interval, num_steps, keep_last)
    assert not enough(save_interval, num_steps, keep_last - 1)
    for kept, wrong in ((keep_last, False), (keep_last - 1, True)):
        config = small_config(
            faults={"spike": "rewind", "spike_num_steps": num_steps},
            checkpoint={"save_interval": save_interval, "keep_last": kept},
            training={"train_iters": 100},
        )
        assert bool(list(check_faults(Facts(config, 1, None)))) is wrong


def enough(save_interval: int, num_steps: int, keep_last: int) -> bool:
    for found in range(50, 100):
        written = [step for step in range(1, found) if step % save_interval == 0]
        if written[-keep_last:][0] > found - num_steps + 1 - 2:
            return False
    return True


def test_a_single_step_needs_the_higher_limit(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, SMALL), ["faults.spike_threshold=40"])
    (problem,) = check_config(loaded, 4, VOCAB_SIZE)
    assert problem.key == "faults.spike_large_threshold"
    assert problem.use_instead == "faults.spike_large_threshold=200.0"


def test_keys_without_effect() -> None:
    def idle(**faults: object) -> set[str]:
        config = small_config(faults=faults)
        return {key for keys, _, _ in idle_keys(config) for key in keys if key.startswith("faults.")}

    assert idle() == {
        f"faults.{name}" for name in ("nonfinite_max_skips_in_a_row", "nonfinite_max_skips", "max_rewinds")
    }
    assert idle(nonfinite="skip", spike="rewind") == set()
    assert "faults.spike_window" in idle(spike="off")
    assert "faults.max_rewinds" not in idle(nonfinite="rewind")
