"""Finds out which rank causes a hang, from what the ranks say of themselves, and what its threads are doing.

The ranks' watchdogs exchange their status through keys of the store that the process group was started with. Must not
know when to look, or what follows.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType

import torch.distributed
from torch.distributed import PrefixStore, Store

from megatron_fp8.monitors.heartbeat import Phase

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
    def from_json(cls, text: str) -> Status:
        """What `to_json` made."""
        values = json.loads(text)
        return cls(**{**values, "phase": Phase(values["phase"])})

    def place(self) -> str:
        """Who it is and what it does, in words."""
        step = f"iteration {self.iteration}, phase {self.phase.value}" if self.iteration else f"{self.phase.value}"
        return f"rank {self.rank} ({self.host}, process {self.pid}): {step}, since {self.since}"


@dataclass(frozen=True)
class Hang:
    """A hang: which ranks cause it, and in which way (`silent`, `still`, `all wait`)."""

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
    def from_json(cls, text: str) -> Hang:
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
        return _hang("still", _least_far(still), author, "makes no progress and is not waiting for other ranks")
    if silent:
        how = "does not report: its process is suspended or its GIL held, or its machine is unreachable"
        return _hang("silent", silent, author, how)
    least_far = _least_far([new for _, new in pairs])
    return _hang("all wait", least_far, author, "is furthest behind, and all ranks wait for each other")


def _least_far(statuses: Sequence[Status]) -> list[Status]:
    least = min((status.iteration, _ORDER[status.phase]) for status in statuses)
    return [status for status in statuses if (status.iteration, _ORDER[status.phase]) == least]


def _hang(kind: str, culprits: Sequence[Status], author: int, how: str) -> Hang:
    first = culprits[0]
    numbers = ", ".join(str(status.rank) for status in culprits[:_MOST_NAMED])
    more = f" and {len(culprits) - _MOST_NAMED} more" if len(culprits) > _MOST_NAMED else ""
    lines = [f"hang detected: rank {numbers}{more} {how}"]
    for status in culprits[:_MOST_STACKS]:
        how_long = "its last report" if kind == "silent" else f"{status.still_seconds:.0f} s"
        works = ", while its device has work left" if status.device_works else ""
        lines.append(f"{status.place()} ({how_long}{works})")
        lines.append(status.stacks or "no stack: its process does not respond")
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
    """The hang that a rank sees alone, when the store that the ranks report through has not answered for `seconds`."""
    return Hang(
        kind="silent",
        culprits=(),
        iteration=own.iteration,
        phase=own.phase,
        host=own.host,
        text=(
            f"hang detected: the store that the ranks report through has not answered for {seconds:.0f} s: the "
            "process that keeps it (the launcher of the first node, or rank 0) or its machine has stopped. "
            f"Seen by {own.place()}"
        ),
        author=own.rank,
    )


_NO_VERDICT = ""


class HangBoard:
    """Messages of `world_size` ranks and one verdict. Raises RuntimeError and its like where the store has gone."""

    def __init__(self, store: Store, world_size: int, timeout_seconds: float) -> None:
        own = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        own.set_timeout(timedelta(seconds=timeout_seconds))
        self._store = PrefixStore("watchdog", own)
        self._world_size = world_size

    def post(self, rank: int, message: str) -> None:
        """Replace what a rank says."""
        self._store.set(f"rank {rank}", message)

    def messages(self) -> Mapping[int, str]:
        """What every rank says that has spoken yet."""
        keys = {rank: f"rank {rank}" for rank in range(self._world_size)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def propose(self, verdict: str) -> str:
        """Make this the verdict, unless there is one already; the one that holds."""
        return self._store.compare_set("verdict", _NO_VERDICT, verdict).decode()

    def verdict(self) -> str | None:
        """The verdict, if there is one."""
        return self._store.get("verdict").decode() if self._store.check(["verdict"]) else None


MOST_CHARACTERS = 30_000
# All below are collectives, or wait for one.
_COLLECTIVES = tuple(
    os.path.join(os.path.dirname(torch.distributed.__file__), name)  # noqa: PTH118, PTH120 - compared as text
    for name in ("distributed_c10d.py", "_functional_collectives.py", "c10d_logger.py")
)
# Calls that end when other ranks' data, or the device's work on it, has come.
_WAITS = re.compile(r"\.(wait|synchronize|item|tolist|cpu)\(|\bfloat\(")
_BACKWARD = os.path.join("torch", "autograd", "graph.py")  # noqa: PTH118


def thread_stacks(without: frozenset[int] = frozenset()) -> str:
    """The Python stacks of all threads but those `without`, the main thread first, as a traceback shows them."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
        if ident not in without
    ]
    return "\n".join(parts)[:MOST_CHARACTERS]


def waits_for_others() -> bool:
    """Whether the main thread is where a rank waits for others: in a collective, or for what comes of one."""
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident or 0)
    if main is None:
        return False
    if _waits(main):
        return True
    # Where the backward pass runs in threads of the device, it is they that wait.
    in_backward = main.f_code.co_filename.endswith(_BACKWARD)
    return in_backward and any(_waits(frame) for frame in frames.values() if frame is not main)


def _waits(innermost: FrameType) -> bool:
    path = innermost.f_code.co_filename
    if path in _COLLECTIVES:
        return True
    if path == threading.__file__:
        return False
    return bool(_WAITS.search(linecache.getline(path, innermost.f_lineno)))
