"""Signals that ask a run to stop: noticed at once, obeyed by all ranks together at the end of a step.

A signal may reach one rank only (a scheduler's pre-emption, an operator's kill); each step the ranks vote, and one
vote is enough. Must not know what is saved.
"""

import signal
from types import FrameType, TracebackType

import torch

# SIGTERM: schedulers and torchrun. SIGUSR1: what Slurm can be told to send some time before the end.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Notices the signals while it is entered.

    Every further one too: a scheduler that signals all processes of a job, and a launcher that passes on its own,
    tell a rank twice within milliseconds. Who does not want to wait for the step has SIGINT and SIGKILL.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._notice)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _notice(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._received = signal.Signals(number)

    def vote(self, also: bool = False) -> str | None:
        """Whether any rank has been told to stop, or says `also`; the reason in words. Collective over all ranks."""
        mine = int(self._received) if self._received is not None else 0
        votes = torch.tensor([mine, int(also)], dtype=torch.int32, device=self._device)
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX)
        number, time_is_up = votes.tolist()
        if number:
            return f"signal {signal.Signals(number).name}"
        return "checkpoint.exit_duration_in_mins has passed" if time_is_up else None
