"""`pretrain.py` that gets signals at moments of a plan: the script of torchrun in tests of kills and of other signals.

The plan is a JSON list in the file KILL_PLAN; its n-th entry belongs to the n-th start. A moment is a function that is
called or that returns, found by Python's own profiler: nothing of the program is patched, and forked processes have it
too. What gets a signal is written to the file KILLED first, a line each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

START = "the start of the script"
# A process that the kernel kills gives its memory back first.
SECONDS_TO_END = 10.0
# Imported last; what is needed to train has been imported before.
LATE = "megatron_fp8.train.setup"


class Killer:
    """Signals this process, or one that it forks, at the moment of a plan's entry; `log` gets a line before that."""

    def __init__(self, entry: dict[str, Any], log: Path) -> None:
        self._entry = entry
        self._log = log
        self._left = entry["count"]
        self._rank_pid = os.getpid()

    def arm(self) -> None:
        """From now on, or from a late import on: the profiler makes what comes before twice as slow."""
        if self._entry["early"] or LATE in sys.modules:
            sys.setprofile(self)
        else:
            sys.addaudithook(self._arm_late)

    def _arm_late(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and arguments[0] == LATE and self._left:
            sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        entry, code = self._entry, frame.f_code
        if entry["writer_sticks"] and os.getpid() != self._rank_pid and code.co_name == "write_sums":
            # As on a disk that does not answer: a writer that is left alone would be there for as long.
            signal.pause()
        if event != entry["event"] or code.co_name != entry["function"] or not code.co_filename.endswith(entry["file"]):
            return
        if (os.getpid() == self._rank_pid) == entry["in_writer"]:
            return
        self._left -= 1
        if self._left == 0:
            self.kill()

    def kill(self) -> None:
        """Now, or so many seconds later, whatever this process does then."""
        sys.setprofile(None)
        children = [child.pid for child in multiprocessing.active_children()]
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**self._entry, "children": children}) + "\n")
        if self._entry["seconds"]:
            later = f"sleep {self._entry['seconds']}; kill -{self._entry['signal'].removeprefix('SIG')} {os.getpid()}"
            subprocess.Popen(["sh", "-c", later])
            return
        for _ in range(self._entry["times"]):
            os.kill(os.getpid(), signal.Signals[self._entry["signal"]])


def orphans(log: Path) -> list[int]:
    """Processes that ranks which were killed had started, and that the kernel has not ended within a while."""
    if not log.exists():
        return []
    lines = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    left = [pid for line in lines for pid in line["children"]]
    deadline = time.monotonic() + SECONDS_TO_END
    while (left := [pid for pid in left if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def runs(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and that nobody has asked about yet."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def main() -> None:
    """Arm the killer of this start, if it is this rank's, and train."""
    plan = json.loads(Path(os.environ["KILL_PLAN"]).read_text(encoding="utf-8"))
    log = Path(os.environ["KILLED"])
    start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    left = orphans(log)
    if left:
        raise SystemExit(f"orphans of the start before: {left}")
    if start < len(plan) and plan[start]["rank"] == rank:
        killer = Killer(plan[start], log)
        if plan[start]["function"] == START:
            killer.kill()
        killer.arm()
    import pretrain

    pretrain.main()


if __name__ == "__main__":
    main()
