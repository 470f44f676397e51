"""Owns what must hold for a trace: steps that the run has, ranks that the job has. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.facts import Alternative, Facts, Finding

START, STOP, RANKS = "profile.start", "profile.stop", "profile.ranks"
_STEPS = 2


def check_profile(facts: Facts) -> Iterator[Finding]:
    """Every mistake of the section `profile`."""
    profile, train_iters = facts.config.profile, facts.config.training.train_iters
    if profile.start is None and profile.stop is None:
        return
    if profile.stop is None and profile.start is not None:
        stop = Alternative(STOP, [profile.start + _STEPS, profile.start + 1], most=1)
        yield Finding("trace's end", STOP, f"{START}={profile.start} begins a trace that never ends", (stop,))
    elif profile.start is None and profile.stop is not None:
        start = Alternative(START, [max(0, profile.stop - _STEPS)])
        yield Finding("trace's start", START, f"{STOP}={profile.stop} ends a trace that never begins", (start,))
    elif profile.start is not None and profile.stop is not None and profile.start >= profile.stop:
        reason = f"the steps after {START}={profile.start} up to it are none"
        later = Alternative(STOP, [profile.start + _STEPS, profile.start + 1], most=1)
        earlier = Alternative(START, [max(0, profile.stop - _STEPS)])
        yield Finding("trace's steps", STOP, reason, (later, earlier))
    # 0: not known yet.
    if train_iters and profile.stop is not None and profile.stop > train_iters:
        reason = f"the run has {train_iters} steps"
        yield Finding("trace's stop", STOP, reason, (Alternative(STOP, [train_iters]),))
    yield from _ranks(facts)


def _ranks(facts: Facts) -> Iterator[Finding]:
    ranks = facts.config.profile.ranks
    wrong = sorted({rank for rank in ranks if rank < 0 or (facts.world_size is not None and rank >= facts.world_size)})
    right = list(dict.fromkeys(rank for rank in ranks if rank not in wrong)) or [0]
    alternative = Alternative(RANKS, [right])
    if not ranks:
        yield Finding("no ranks", RANKS, f"{START} is set, and no rank is to be traced", (alternative,))
    elif wrong:
        job = (
            "ranks are counted from 0" if facts.world_size is None else f"the job has ranks 0 to {facts.world_size - 1}"
        )
        yield Finding("ranks", RANKS, f"no such rank as {', '.join(map(str, wrong))}: {job}", (alternative,))
    elif len(set(ranks)) < len(ranks):
        yield Finding("ranks twice", RANKS, "a rank is named more than once", (alternative,))
