"""What a person sees while files are measured: nothing too often, and something where there is no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megatron_fp8.commands import progress_bars
from megatron_fp8.commands.progress_bars import items_bar


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    set_by_hand = Clock()
    monkeypatch.setattr(progress_bars, "time", set_by_hand)
    return set_by_hand


def lines_of(clock: Clock, shows: bool = True, terminal: bool = False) -> list[str]:
    """What is written while 100 windows of a file take 2 s each, then those of another."""
    written = io.StringIO()
    with items_bar("windows", shows, Console(file=written, force_terminal=terminal, width=80)) as on_windows:
        for name in ("valid", "other"):
            for done in range(101):
                on_windows(name, 100, done)
                clock.now += 2.0
    return written.getvalue().splitlines()


def test_a_line_every_half_minute_where_there_is_no_terminal(clock: Clock) -> None:
    lines = lines_of(clock)
    assert lines[0] == "valid: 15 of 100 windows, 170 s left"
    assert len(lines) == 2 * (200 // 30)
    assert lines[-1].startswith("other: 90 of 100 windows")


def test_other_ranks_and_terminals_get_no_lines(clock: Clock) -> None:
    assert lines_of(clock, shows=False) == []
    assert not any("s left" in line for line in lines_of(clock, terminal=True))
