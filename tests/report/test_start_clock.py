"""The parts of a start add up to it, and a start ends once."""

from __future__ import annotations

import pytest

from megatron_fp8.report import start_clock
from megatron_fp8.report.start_clock import StartClock


def test_parts_add_up_and_a_part_that_is_entered_again_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 101.0, 103.0, 106.0, 110.0, 120.0])
    monkeypatch.setattr(start_clock.time, "monotonic", lambda: next(times))
    clock = StartClock()
    for part in ("import", "data", "import"):
        clock.end_part(part)
    assert clock.end("first-step") == {
        "seconds": 10.0,
        "import-seconds": 4.0,
        "data-seconds": 2.0,
        "first-step-seconds": 4.0,
    }
    # A rollback trains again in the same job.
    clock.end_part("data")
    assert clock.end("first-step") is None
    assert clock.seconds == 20.0
