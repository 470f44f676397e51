"""How long a rank may stand still, by the config."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fp8.config.check import check_config
from megatron_fp8.config.load import load_config
from megatron_fp8.monitors.liveness import hang_limits
from tests.small_run import small_config

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def problems(*overrides: str) -> list[str]:
    return [problem.key for problem in check_config(load_config(CONFIG, overrides), 2, 8192)]


def test_a_hang_is_found_before_collectives_end() -> None:
    assert "faults.hang_timeout_minutes" in problems("faults.hang_timeout_minutes=10")
    assert "faults.hang_timeout_minutes" not in problems("faults.hang_timeout_minutes=9.5")
    assert "faults.hang_timeout_minutes" not in problems("faults.hang_timeout_minutes=0")
    both = ("faults.hang_timeout_minutes=30", "parallel.distributed_timeout_minutes=60")
    assert "faults.hang_timeout_minutes" not in problems(*both)


def test_limits() -> None:
    usual = hang_limits(small_config(parallel={"distributed_timeout_minutes": 4.0}))
    assert usual is not None
    assert (usual.of(slow=False), usual.of(slow=True)) == (120, 3600)
    assert usual.period_seconds == 5
    own = hang_limits(small_config(faults={"hang_timeout_minutes": 0.1, "hang_timeout_slow_minutes": None}))
    assert own is not None
    assert own.of(slow=False) == pytest.approx(6)
    assert own.of(slow=True) == float("inf")
    assert hang_limits(small_config(faults={"hang_timeout_minutes": 0})) is None
