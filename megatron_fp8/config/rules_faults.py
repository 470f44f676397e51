"""Owns what must hold for a run that may go back to a checkpoint, and for what makes a spike. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.facts import Alternative, Facts, Finding

SAVE = "checkpoint.save"
SAVE_INTERVAL = "checkpoint.save_interval"
KEEP_LAST = "checkpoint.keep_last"
LARGE = "faults.spike_large_threshold"


def check_faults(facts: Facts) -> Iterator[Finding]:
    """Every mistake of the policies for steps that go wrong."""
    faults = facts.config.faults
    if faults.spike != "off" and faults.spike_large_threshold < faults.spike_threshold:
        reason = f"it is below faults.spike_threshold={faults.spike_threshold:g}, which needs several steps"
        yield Finding("large spike", LARGE, reason, (Alternative(LARGE, [5 * faults.spike_threshold]),))
    for policy in ("nonfinite", "spike"):
        if getattr(faults, policy) == "rewind":
            yield from _rewind(facts, policy)


def _rewind(facts: Facts, policy: str) -> Iterator[Finding]:
    """There must be a checkpoint to go back to, from before the bad steps."""
    faults, checkpoint, key = facts.config.faults, facts.config.checkpoint, f"faults.{policy}"
    other = Alternative(key, ["stop" if policy == "nonfinite" else "warn"])
    train_iters = facts.config.training.train_iters
    if not checkpoint.save:
        reason = f"{SAVE} is false: there is no checkpoint to go back to"
        yield Finding(f"{policy}: no checkpoints", key, reason, (Alternative(SAVE, [True]), other))
    elif checkpoint.save_interval == 0 or 0 < train_iters <= checkpoint.save_interval:
        reason = f"with {SAVE_INTERVAL}={checkpoint.save_interval} no checkpoint is written before the end of the run"
        smaller = Alternative(SAVE_INTERVAL, [1000, 100, 10, 1], most=1)
        yield Finding(f"{policy}: no checkpoints", key, reason, (smaller, other))
    elif checkpoint.keep_last is not None:
        # Those that are kept may all be of the steps until a spike is noticed, but for the oldest.
        steps = faults.spike_num_steps if policy == "spike" else 1
        least = 1 + -(-steps // checkpoint.save_interval)
        if checkpoint.keep_last < least:
            reason = (
                f"{key}=rewind needs a checkpoint from before the bad steps, of which there can be {steps}; by then "
                f"{checkpoint.keep_last} newer ones, {checkpoint.save_interval} steps apart, have taken its place"
            )
            enough = Alternative(KEEP_LAST, [least, None])
            yield Finding(f"{policy}: kept checkpoints", KEEP_LAST, reason, (enough, other))
