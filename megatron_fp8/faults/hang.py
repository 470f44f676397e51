"""Owns the verdict on a job that does not advance: which rank holds it up, from what all ranks say of themselves.

A rank that hangs holds up all others, each in a collective, so that to itself every rank looks alike. The one to name
is, in this order: a rank that stands still and does not wait for others, of several those that are the least far; a
rank whose process says nothing any more (stopped, or its interpreter is held); where all wait for each other, those
that are the least far.

A host runs ahead of its device. It waits in a collective or for a result, or, when it is so far ahead that the launch
queue is full, in a launch. That is any line of the program, and may hold the interpreter, so that the rank is silent:
therefore a rank that stands still is named before one that says nothing. What tells a launch from standing still is the
device: a culprit's has done all that it was given, that of a rank which waits in a launch has not, and what keeps it is
a collective that the culprit never entered. Imports no torch.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megatron_fp8.faults.heartbeat import Phase

_MOST_STACKS = 4
_MOST_NAMED = 16
# Ranks meet between these, in the order of the loop; data and passes alternate in a step.
_ORDER = {
    Phase.START: 0,
    Phase.DATA: 1,
    Phase.FORWARD_BACKWARD: 1,
    Phase.OPTIMIZER: 2,
    Phase.PROFILE: 3,
    Phase.EVALUATION: 4,
    Phase.CHECKPOINT: 5,
}


class HangError(RuntimeError):
    """The job did not advance any more; the text says which rank held it up, where."""


@dataclass(frozen=True)
class Status:
    """What a rank says of itself.

    `number`: of this message. `count`: of its heartbeat. `still_seconds`: for how long that has not grown. `since`: the
    same as local time of day. `late`: it is longer than the phase may take. `waits`: its main thread waits for others,
    looked at only when it stands still for long. `stacks`: of its threads, when it is late. `left`: its training is
    over. `device_works`: its device has not done all that it was given, looked at as `waits` is.
    """

    rank: int
    host: str
    pid: int
    number: int
    count: int
    iteration: int
    phase: Phase
    still_seconds: float
    since: str
    late: bool
    waits: bool
    stacks: str
    left: bool = False
    device_works: bool = False

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Status":
        """What `to_json` made."""
        values = json.loads(text)
        return cls(**{**values, "phase": Phase(values["phase"])})

    def place(self) -> str:
        """Who it is and what it does, in words."""
        step = f"iteration {self.iteration}, phase {self.phase.value}" if self.iteration else f"{self.phase.value}"
        return f"rank {self.rank} ({self.host}, process {self.pid}): {step}, since {self.since}"


@dataclass(frozen=True)
class Hang:
    """A job that hangs: who holds it up and in which way (`silent`, `still`, `all wait`)."""

    kind: str
    culprits: tuple[int, ...]
    iteration: int
    phase: Phase
    host: str
    text: str
    author: int

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Hang":
        """What `to_json` made."""
        values = json.loads(text)
        return cls(**{**values, "phase": Phase(values["phase"]), "culprits": tuple(values["culprits"])})

    @property
    def speaker(self) -> int:
        """The rank whose error is the job's: a culprit, if one can still speak."""
        return self.author if self.kind == "silent" else self.culprits[0]


def find_hang(before: Sequence[Status], after: Sequence[Status], author: int) -> Hang | None:
    """The hang that `author` sees in two looks at all ranks, long enough apart that each should have spoken between.

    None: some rank still works, or may take longer for what it does.
    """
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if not new.left]
    silent = [new for old, new in pairs if new.number == old.number]
    speaking = [(old, new) for old, new in pairs if new.number != old.number]
    busy = [new for _, new in speaking if not new.waits]
    if any(new.count != old.count for old, new in speaking) or any(not new.late for new in busy):
        return None
    still = [new for new in busy if not new.device_works]
    if still:
        return _hang("still", _least_far(still), author, "standing still without waiting for others")
    if silent:
        how = "silent: its process is stopped or its interpreter held, or its machine is out of reach"
        return _hang("silent", silent, author, how)
    least_far = _least_far([new for _, new in pairs])
    return _hang("all wait", least_far, author, "least far of all, which wait for each other")


def _least_far(statuses: Sequence[Status]) -> list[Status]:
    least = min((status.iteration, _ORDER[status.phase]) for status in statuses)
    return [status for status in statuses if (status.iteration, _ORDER[status.phase]) == least]


def _hang(kind: str, culprits: Sequence[Status], author: int, how: str) -> Hang:
    first = culprits[0]
    numbers = ", ".join(str(status.rank) for status in culprits[:_MOST_NAMED])
    more = f" and {len(culprits) - _MOST_NAMED} more" if len(culprits) > _MOST_NAMED else ""
    lines = [f"the job hangs, held up by rank {numbers}{more}: {how}"]
    for status in culprits[:_MOST_STACKS]:
        how_long = "as it was last heard of" if kind == "silent" else f"{status.still_seconds:.0f} s"
        works = ", while its device has work left" if status.device_works else ""
        lines.append(f"{status.place()} ({how_long}{works})")
        lines.append(status.stacks or "no stack: its process does not answer")
    return Hang(
        kind=kind,
        culprits=tuple(status.rank for status in culprits),
        iteration=first.iteration,
        phase=first.phase,
        host=first.host,
        text="\n".join(lines),
        author=author,
    )


def without_store(own: Status, seconds: float) -> Hang:
    """The hang that a rank sees alone, when the store through which ranks speak has not answered for `seconds`."""
    return Hang(
        kind="silent",
        culprits=(),
        iteration=own.iteration,
        phase=own.phase,
        host=own.host,
        text=(
            f"the job hangs, and the store through which ranks speak has not answered for {seconds:.0f} s: the "
            "process that keeps it (the launcher of the first node, or rank 0) or its machine has stopped. "
            f"Seen by {own.place()}"
        ),
        author=own.rank,
    )
