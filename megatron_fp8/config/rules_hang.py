"""Owns what must hold for a hang to be found: that nothing else ends the job before. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.facts import Alternative, Facts, Finding

HANG, COLLECTIVES = "faults.hang_timeout_minutes", "parallel.distributed_timeout_minutes"


def check_hang(facts: Facts) -> Iterator[Finding]:
    """A time after which collectives have ended the job already, without naming the rank that held it up."""
    minutes, collectives = facts.get(HANG), facts.get(COLLECTIVES)
    if minutes and minutes >= collectives:
        reason = f"{COLLECTIVES}={collectives:g} ends the job before, and cannot name the rank that held it up"
        shorter, longer = Alternative(HANG, [None]), Alternative(COLLECTIVES, [2 * minutes])
        yield Finding("time of a hang", HANG, reason, (shorter, longer))
